"""What failed is run once more, and only then is it unstable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "again.py"
# passes from the second time on
UNSTABLE = """
def test_{name}(request):
    place = request.config.rootpath / "{name}"
    place.write_text(place.read_text() + "x" if place.exists() else "x")
    assert len(place.read_text()) > {failures}, "the time before"
def test_other():
    pass
"""


@pytest.fixture
def again(tmp_path):
    def run(text, *words):
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "test_it.py").write_text(text)
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "HVDTRAIN"))}
        environ["HVDTRAIN_UNSTABLE"] = str(tmp_path / "unstable.txt")
        command = [sys.executable, str(SCRIPT), "-m", "pytest", "-q", *words, "test_it.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        unstable = tmp_path / "unstable.txt"
        return done.returncode, done.stdout, unstable.read_text().split() if unstable.exists() else []

    return run


@pytest.mark.parametrize("words", [(), ("-n", "2", "--dist", "loadgroup")])
def test_what_passes_the_second_time_is_unstable(again, words):
    code, output, unstable = again(UNSTABLE.format(name="a", failures=1), *words)
    assert (code, unstable) == (0, ["test_it.py::test_a"])
    assert "the time before" in output
    assert "1 passed" in output.split("once more")[1]  # nothing but what failed


def test_what_fails_twice_fails(again):
    both = UNSTABLE.format(name="a", failures=1) + UNSTABLE.format(name="b", failures=2)
    code, output, unstable = again(both)
    assert (code, unstable) == (1, [])
    assert "1 failed, 1 passed" in output


def test_what_passes_is_run_once(again):
    code, output, unstable = again(UNSTABLE.format(name="a", failures=0))
    assert (code, unstable) == (0, [])
    assert "once more" not in output


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        ("".join(UNSTABLE.format(name=f"a{n}", failures=1) for n in range(6)), (), 1),
        ("raise RuntimeError\n", (), 2),
        ("import os\ndef test_a():\n    os._exit(3)\n", (), 3),
        ("import os\ndef test_a():\n    os._exit(3)\n", ("-n", "1"), 1),
        ("def test_a():\n    raise KeyboardInterrupt\n", (), 2),
        ("", (), 5),
    ],
)
def test_what_is_no_failed_test_is_not_run_again(again, text, words, code):
    found, output, unstable = again(text, *words)
    assert (found, unstable) == (code, [])
    assert "once more" not in output
