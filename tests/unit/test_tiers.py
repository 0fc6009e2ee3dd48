"""The tests that `make test` leaves to `.ci/run`, and groups of tests: what names them names something."""

import re
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.groups import APART, IN_TURN, POOLS, POOLS_OF_TENSORFLOW, SECONDS, UNDIVIDED, Groups, group_of
from support.tiers import LEFT_OUT
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = ("contract", "conformance", "parallel", "faults")
FILES = {path.name: path for folder in FOLDERS for path in (TESTS / folder).iterdir()}


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


def test_files_of_groups_exist():
    assert {*APART, *IN_TURN, *UNDIVIDED} <= FILES.keys()
    assert not {*APART, *UNDIVIDED} & set(IN_TURN)
    files = {"/".join(path.with_suffix("").parts[-2:]) for path in TESTS.rglob("test_*.py")}
    assert SECONDS.keys() <= {POOLS, POOLS_OF_TENSORFLOW, *files}


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("parallel/test_curves.py::test_same[torch-mpi]", POOLS),
        ("parallel/test_curves.py::test_same[tf-mpi]", POOLS_OF_TENSORFLOW),
        ("parallel/test_curves.py::test_same[tf-torch]", POOLS),
        ("parallel/test_ema.py::test_ema[tf]", POOLS),
        ("parallel/test_bench.py::test_a_job[tf-gloo]", "parallel/test_bench"),
        ("faults/test_mistakes.py::test_a_mistake[tf]", POOLS),
        ("faults/test_stopped.py::test_it_ends[tf-mpi]", "faults/test_stopped"),
    ],
)
def test_a_group_has_what_shares_pools_or_a_file(test, group):
    assert group_of(f"tests/{test}") == group


@pytest.mark.parametrize(
    ("reorder", "first"), [(True, [POOLS, "faults/test_drill", "x"]), (False, ["x", POOLS])]
)
def test_what_takes_longest_is_dealt_out_first(reorder, first, monkeypatch):
    monkeypatch.setattr(
        LoadScopeScheduling,
        "_assign_work_unit",
        lambda self, _: dealt.append(self.workqueue.popitem(False)[0]),
    )
    groups, dealt = Groups.__new__(Groups), []
    groups.config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=reorder))
    groups.workqueue = OrderedDict({"x": {"a": False, "b": False}, POOLS: {}, "faults/test_drill": {}})
    for _ in first:
        groups._assign_work_unit(None)
    assert dealt == first
