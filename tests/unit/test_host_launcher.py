"""The rank that a launcher passes, and the terminal that it writes to."""

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from hvdtrain.host import launcher
from hvdtrain.host.launcher import host_name, launched_rank, open_console

LAUNCHERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched_by(monkeypatch):
    """Let this process be rank 0 of a launcher with the given name and output file."""

    def start(name: str, output: str | Exception) -> None:
        others = [SimpleNamespace(name=lambda: "sh", pid=pid) for pid in (41, 43)]
        parents = [others[0], SimpleNamespace(name=lambda: name, pid=42), others[1]]
        monkeypatch.setenv("HOROVOD_RANK", "0")
        monkeypatch.setattr(launcher.psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))
        monkeypatch.setattr(launcher.os, "readlink", Mock(side_effect=[output]))

    return start


@pytest.mark.parametrize("variable", LAUNCHERS)
def test_every_launcher_tells_the_rank(monkeypatch, variable):
    monkeypatch.setenv(variable, "13")
    assert launched_rank() == 13


@pytest.mark.parametrize("name", ["horovodrun", "mpirun"])
def test_under_a_launcher_the_console_is_its_terminal(launched_by, name):
    controller, shown = os.openpty()
    path = os.ttyname(shown)
    launched_by(name, path)
    console = open_console()
    launcher.os.readlink.assert_called_once_with("/proc/42/fd/1")
    console.print("hello")
    console.file.close()
    os.close(shown)
    assert console.is_terminal
    assert os.read(controller, 100).startswith(b"hello")
    os.close(controller)


@pytest.mark.parametrize("output", ["pipe:[123]", psutil.NoSuchProcess(42)])
def test_if_the_launcher_has_no_terminal_lines_go_to_standard_output(launched_by, output, capsys):
    launched_by("mpirun", output)
    console = open_console()
    console.print("x" * 200, highlight=False)
    assert not console.is_terminal
    assert capsys.readouterr().out == "x" * 200 + "\n"  # not broken: a launcher tags every line


def run_here(code: str, **pipes: object) -> subprocess.Popen:
    """Start Python without a launcher, with a terminal's width in the environment."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    command = [sys.executable, "-c", f"from hvdtrain.host.launcher import open_console\n{code}"]
    return subprocess.Popen(command, env={**environ, "COLUMNS": "80"}, text=True, **pipes)


def test_a_reader_of_the_output_that_goes_away_does_not_end_the_job():
    code = "console = open_console()\nfor _ in range(3000): console.print('x' * 100)\nprint('y')"
    process = run_here(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read().startswith("note: cannot write to standard output: Broken pipe; the job")
    process.stderr.close()
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, os.uname().nodename),
        ({"HOROVOD_HOSTNAME": "localhost"}, os.uname().nodename),
        ({"HOROVOD_HOSTNAME": "localhost", "HVDTRAIN_ELASTIC": "127.0.0.1:4000"}, "localhost"),
    ],
)
def test_a_host_of_an_elastic_job_has_the_name_that_its_launcher_gives_it(environ, expected):
    assert host_name(environ) == expected
