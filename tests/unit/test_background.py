"""Preparations of tests in the background: they are limited in time, and nothing of them stays behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import background
import psutil
import pytest
from background import Preparation


@pytest.fixture
def start(tmp_path):
    """A function that starts a shell script as a preparation, which the fixture ends."""
    started = []

    def start(script: str, seconds: float = 60) -> Preparation:
        started.append(Preparation(f"number{len(started)}", ["sh", "-c", script], tmp_path, seconds=seconds))
        return started[-1]

    yield start
    for one in started:
        one.end()


def await_that(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def number_in(path: Path) -> int:
    await_that(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_one_that_succeeds_says_nothing(start, capsys):
    assert start("echo fine").wait()
    assert capsys.readouterr().out == ""


def test_the_log_of_one_that_fails_is_printed(start, capsys):
    assert not start("echo why; exit 5").wait()
    assert capsys.readouterr().out == "== number0 failed with 5; the end of its log:\nwhy\n\n"


def test_one_that_takes_too_long_has_failed(start, capsys):
    assert not start("sleep 1000", seconds=0.5).wait()
    assert "failed with 124" in capsys.readouterr().out


@pytest.mark.parametrize("group", ["", "setsid"])
def test_no_process_is_left(start, tmp_path, monkeypatch, group):
    monkeypatch.setattr(background, "_END_SECONDS", 0.5)
    one = start(
        f"trap '' TERM; {group} sleep 1000 & echo $! >{tmp_path}/pid; wait; echo ended >{tmp_path}/ended"
    )
    pid = number_in(tmp_path / "pid")
    assert is_running(pid)
    one.end()
    assert not is_running(one._process.pid)
    await_that(lambda: not is_running(pid))


def test_it_ends_with_the_process_that_started_it(tmp_path):
    code = "import sys; from pathlib import Path; from background import Preparation; "
    code += "Preparation('one', ['sh', '-c', sys.argv[1]], Path(sys.argv[2])); sys.stdin.read()"
    words = [sys.executable, "-c", code, f"echo $$ >{tmp_path}/pid; exec sleep 1000", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(Path(background.__file__).parent)}
    with subprocess.Popen(words, env=environ, stdin=subprocess.PIPE) as process:
        pid = number_in(tmp_path / "pid")
        process.kill()
    await_that(lambda: not is_running(pid))


def test_the_exit_code_of_the_command_is_that_of_all():
    words = [sys.executable, background.__file__, "--", "sh", "-c", "exit 7"]
    assert subprocess.run(words, check=False).returncode == 7
