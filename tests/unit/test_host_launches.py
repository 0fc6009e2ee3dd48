"""What launchers state in the environment, the refusal if Horovod does not see them, and their terminal."""

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host import launcher
from hvdtrain.host.launcher import (
    Launch,
    check_launch_is_seen,
    host_name,
    launched_rank,
    open_console,
    output_rank,
    stated_launch,
)

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
TENSORFLOW = {"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"index": 1}}'}
PODS = {"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "pod-0"}


@pytest.mark.parametrize(
    ("environ", "launcher", "size", "rank"),
    [
        (TORCHRUN, "torchrun", 4, 1),
        (MPIRUN, "mpirun", 2, 1),
        (STEP, "srun", 2, 1),
        (PODS, "a launcher", 3, 2),
        (TENSORFLOW, "a launcher", 2, 1),
        ({"PMIX_RANK": "3"}, "a launcher with PMIx", 4, 3),
        ({**STEP, **MPIRUN}, "mpirun", 2, 1),  # srun starts mpirun's daemons
        ({**MPIRUN, **TORCHRUN}, "torchrun", 4, 1),  # mpirun starts torchrun once per host
        ({**TORCHRUN, "HOROVOD_SIZE": "5", "HOROVOD_RANK": "2"}, "horovodrun", 5, 2),
    ],
)
def test_every_launcher_states_size_and_rank_and_the_innermost_counts(environ, launcher, size, rank):
    launch = stated_launch(environ)
    assert (launch.launcher, launch.size, launch.rank) == (launcher, size, rank)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script, or a shell of salloc
        {**STEP, "SLURM_PTY_PORT": "1234"},  # a shell of srun --pty
        {"WORLD_SIZE": "4"},
        {"TF_CONFIG": '{"cluster": [], "task": 1}'},
    ],
    ids=str,
)
def test_what_no_launcher_states(environ):
    assert stated_launch(environ) is None


@pytest.mark.parametrize(
    ("title", "is_step"), [("slurmstepd: [5.batch]", False), ("slurmstepd: [5.0]", True)]
)
def test_a_batch_script_may_inherit_the_variables_of_a_step(monkeypatch, title, is_step):
    daemon = SimpleNamespace(name=lambda: "slurmstepd", cmdline=lambda: [title, ""])
    monkeypatch.setattr(psutil.Process, "parents", lambda _: [daemon])
    assert (stated_launch(STEP) is not None) == is_step


@pytest.mark.parametrize("environ", [TORCHRUN, PODS], ids=str)
def test_processes_that_horovod_does_not_see_are_refused(environ):
    launch = stated_launch(environ)
    words = f"{launch.launcher} started {launch.size} processes"
    with pytest.raises(EnvironmentFault, match=words) as caught:
        check_launch_is_seen(launch, size=1, rank=0)
    assert launch.variable in caught.value.problem
    assert "Start with `" in caught.value.remedy
    assert caught.value.everywhere


def test_fewer_workers_are_refused_and_only_a_rank_that_knows_of_others_speaks():
    with pytest.raises(EnvironmentFault, match="3 workers, with rank 1 here"):
        check_launch_is_seen(Launch("mpirun", "OMPI_COMM_WORLD_SIZE", 4, 1), 3, 1)
    with pytest.raises(EnvironmentFault) as caught:
        check_launch_is_seen(stated_launch({"PMIX_RANK": "1"}), 1, 0)
    assert not caught.value.everywhere


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        (TORCHRUN, 1),
        (PODS, None),  # each pod has an output of its own
        ({**PODS, "LOCAL_RANK": "2"}, 2),
    ],
    ids=str,
)
def test_the_rank_among_those_that_share_an_output(monkeypatch, environ, rank):
    monkeypatch.setattr(launcher.os, "environ", environ)
    monkeypatch.setattr(launcher, "stated_launch", lambda: stated_launch(environ))
    assert output_rank() == rank


ELASTIC = {"HVDTRAIN_ELASTIC": "127.0.0.1:4000"}


@pytest.mark.parametrize("launcher", [STEP, MPIRUN])
def test_in_an_elastic_job_only_the_world_counts(launcher, monkeypatch):
    assert stated_launch({**launcher, **ELASTIC}) is None
    launch = stated_launch({**launcher, **ELASTIC, "HOROVOD_SIZE": "3", "HOROVOD_RANK": "2"})
    assert (launch.size, launch.rank) == (3, 2)
    for name, value in {**launcher, **ELASTIC}.items():
        monkeypatch.setenv(name, value)
    assert output_rank() is None
    monkeypatch.setenv("HOROVOD_RANK", "1")
    assert output_rank() == 1


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
