"""The tests that `make test` leaves to `.ci/run`: what names them names something."""

import re
from pathlib import Path

import pytest
from support.tiers import LEFT_OUT

TESTS = Path(__file__).resolve().parents[1]
FILES = {
    path.name: path for folder in ("contract", "parallel", "faults") for path in (TESTS / folder).iterdir()
}


@pytest.mark.parametrize("pattern", LEFT_OUT)
def test_a_pattern_names_a_file_and_where_it_can_be_told_a_test_of_it(pattern):
    file, _, rest = pattern.partition("::")
    source = FILES[file.replace("\\", "")].read_text(encoding="utf-8")
    function = re.split(r"\.\*|\\\[", rest)[0]
    if function.startswith("test_"):
        names = re.findall(r"^def (test_\w+)", source, re.MULTILINE)
        assert [name for name in names if re.match(function, name)], f"{pattern} names no test"


def test_each_file_and_test_is_left_out_by_one_pattern():
    assert len(set(LEFT_OUT)) == len(LEFT_OUT)
