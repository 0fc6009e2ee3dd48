"""The processes that bench starts: how they end, and that nothing is left of them."""

import subprocess
import sys
import time

import psutil
import pytest

from hvdtrain.errors import EnvironmentFault
from hvdtrain.tools.launch import run_module


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.parametrize(
    ("text", "limit", "said"),
    [
        ("print('why it failed'); raise SystemExit(3)", 300, "it ended with exit code 3"),
        ("import time; time.sleep(60)", 0.5, "it did not end within 0 s and was ended"),
    ],
)
def test_a_program_that_fails_is_said_with_its_output(text, limit, said, tmp_path):
    with pytest.raises(EnvironmentFault, match=said) as error:
        run_module("it", python(text), "module", {}, tmp_path, limit)
    assert ("why it failed" in error.value.remedy) == ("why" in text)
    assert ("--seconds" in error.value.remedy) == ("did not end" in said)


def test_what_a_process_of_a_program_leaves_behind_is_ended(tmp_path):
    mark = f"child-{tmp_path.name}"
    spawn = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', "
    with pytest.raises(EnvironmentFault, match="without a result"):
        run_module("it", python(f"{spawn}{mark!r}])"), "module", {}, tmp_path, 300)
    assert comes_to(mark, is_there=False)


def test_an_interrupt_leaves_no_process(tmp_path, monkeypatch):
    mark, wait = f"interrupted-{tmp_path.name}", subprocess.Popen.wait

    def interrupted(process, timeout):
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        assert comes_to(mark, is_there=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)  # as a signal comes while it waits
    waits = [*python("import time; time.sleep(600)"), mark]
    with pytest.raises(KeyboardInterrupt):
        run_module("it", waits, "module", {}, tmp_path, 300)
    assert comes_to(mark, is_there=False)


def comes_to(mark: str, is_there: bool) -> bool:
    """Return whether a process with a text in its command comes, or is gone, which may take a moment."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = (" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))
        if any(mark in command for command in found) == is_there:
            return True
    return False
