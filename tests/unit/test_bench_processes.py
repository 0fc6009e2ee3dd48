"""The processes that bench starts: how they end, and that nothing is left of them."""

import sys
import time

import psutil
import pytest

from hvdtrain.errors import EnvironmentFault
from hvdtrain.tools import launch
from hvdtrain.tools.launch import Program, run_program


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_what_a_program_found_is_returned(tmp_path):
    found = tmp_path / "found.json"
    write = python(f"open({str(found)!r}, 'w').write('{{\"a\": 1}}')")
    assert run_program(Program("it", [write, python("pass")], 300), found) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "limit", "said"),
    [
        ("print('why it failed'); raise SystemExit(3)", 300, "it ended with exit code 3"),
        ("pass", 300, "it ended without a result"),
        ("import time; time.sleep(60)", 0.5, "it did not end within 0 s and was ended"),
    ],
)
def test_a_program_that_fails_is_said_with_its_output(text, limit, said, tmp_path):
    with pytest.raises(EnvironmentFault, match=said) as error:
        run_program(Program("it", [python(text)], limit), tmp_path / "found.json")
    assert ("why it failed" in error.value.remedy) == ("why" in text)
    assert ("--seconds" in error.value.remedy) == ("did not end" in said)


def test_what_a_process_of_a_program_leaves_behind_is_ended(tmp_path):
    mark = f"child-{tmp_path.name}"
    spawn = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', "
    with pytest.raises(EnvironmentFault, match="without a result"):
        run_program(Program("it", [python(f"{spawn}{mark!r}])")], 300), tmp_path / "found.json")
    assert is_gone(mark)


def test_all_processes_of_a_program_are_asked_to_end_together(tmp_path):
    ready, asked, together = (tmp_path / name for name in ("ready", "asked", "together"))
    for folder in (ready, asked, together):
        folder.mkdir()
    slow = f"""
import os, pathlib, signal, sys, time
def end(*_):
    pathlib.Path({str(asked)!r}, str(os.getpid())).touch()
    while len(list(pathlib.Path({str(asked)!r}).iterdir())) < 3:
        time.sleep(0.02)
    pathlib.Path({str(together)!r}, str(os.getpid())).touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path({str(ready)!r}, str(os.getpid())).touch()
time.sleep(600)
"""
    fails = f"""
import pathlib, sys, time
while len(list(pathlib.Path({str(ready)!r}).iterdir())) < 3:
    time.sleep(0.02)
sys.exit(3)
"""
    commands = [*map(python, 3 * [slow]), python(fails)]
    with pytest.raises(EnvironmentFault, match="exit code 3"):
        run_program(Program("it", commands, 300), tmp_path / "found.json")
    assert len(list(together.iterdir())) == 3  # none of them ended before all were asked


def test_the_signal_that_ended_a_program_is_its_code(tmp_path):
    kills = python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(EnvironmentFault, match="exit code -9"):
        run_program(Program("it", [kills], 300), tmp_path / "found.json")


def test_an_interrupt_leaves_no_process(tmp_path, monkeypatch):
    mark, sleep, seen = f"interrupted-{tmp_path.name}", time.sleep, []

    def interrupted(seconds):
        sleep(seconds)
        if not seen and mark in running():
            seen.append(mark)
            raise KeyboardInterrupt

    monkeypatch.setattr(launch.time, "sleep", interrupted)  # as a signal comes while it waits
    waits = [*python("import time; time.sleep(600)"), mark]
    with pytest.raises(KeyboardInterrupt):
        run_program(Program("it", [waits], 300), tmp_path / "found.json")
    monkeypatch.undo()
    assert is_gone(mark)


def running() -> str:
    """Return the commands of all processes; psutil reads them whole, ps at most the width of a terminal."""
    return "\n".join(" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))


def is_gone(mark: str) -> bool:
    """Return whether no process has a text in its command; one that was killed may take a moment to end."""
    until = time.monotonic() + 60
    while mark in running() and time.monotonic() < until:
        pass
    return mark not in running()


def test_the_other_processes_of_a_program_that_fails_are_ended(tmp_path):
    mark = f"left-{tmp_path.name}"
    sleeps = [*python("import time; time.sleep(600)"), mark]
    with pytest.raises(EnvironmentFault, match="exit code 3"):
        run_program(Program("it", [sleeps, python("raise SystemExit(3)")], 300), tmp_path / "found.json")
    assert is_gone(mark)
