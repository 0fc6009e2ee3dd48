"""What launchers state and hvdtrain sets in the environment, what is refused, and a launcher's terminal."""

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from hvdtrain.elastic.member.orders import blame_for
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host import cores, environment, launcher
from hvdtrain.host.environment import check_host, prepare
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


def test_a_host_of_an_elastic_job_has_the_name_that_its_launcher_gives_it():
    assert host_name({"HOROVOD_HOSTNAME": "localhost"}) == host_name({}) == os.uname().nodename
    assert host_name({"HOROVOD_HOSTNAME": "localhost", **ELASTIC}) == "localhost"


GLOO = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_IFACE": "lo"}


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch):
    monkeypatch.setattr(environment, "cores_per_worker", lambda local_size: 4 / local_size)


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")


def test_without_a_launcher_gloo_coordinates_the_one_worker():
    environ: dict[str, str] = {}
    prepare(environ)
    gloo = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    assert environ == {**gloo, "UCX_DEBUG_SIGNO": "0"}  # SIGHUP is hvdtrain's


def test_horovod_does_not_end_long_work_that_the_watch_knows_of(launched):
    assert prepare({}, stall_timeout=120) == {"HOROVOD_FUSION_THRESHOLD": "0"}


@pytest.mark.parametrize(("shutdown", "check"), [("30", "15"), ("1", "1"), ("61", None)])
def test_a_stall_limit_of_the_user_below_a_minute_acts(launched, shutdown, check):
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": shutdown}
    assert prepare(environ).get("HOROVOD_STALL_CHECK_TIME_SECONDS") == check
    assert environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == shutdown


@pytest.mark.parametrize(
    ("environ", "yields", "nanoseconds"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "16"}, True, "200000"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "SLURM_NODEID": "2"}, True, None),
    ],
)
def test_open_mpi_yields_if_threads_outnumber_cores_and_sleeps_if_workers_do(
    launched, environ, yields, nanoseconds
):
    set_for_user = prepare(environ)
    assert (set_for_user.get("OMPI_MCA_mpi_yield_when_idle") == "1") == yields
    strategy = set_for_user.get("OMPI_MCA_threads_pthreads_yield_strategy")
    assert strategy == ("nanosleep" if nanoseconds else None)
    assert set_for_user.get("OMPI_MCA_threads_pthreads_nanosleep_time") == nanoseconds


def test_what_the_user_set_is_not_changed(launched):
    environ = {
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "HOROVOD_FUSION_THRESHOLD": "1000000",
        "UCX_DEBUG_SIGNO": "1",
    }
    kept = dict(environ)
    assert prepare(environ) == {}
    assert environ == kept


@pytest.mark.parametrize(
    ("environ", "stall_timeout", "seconds"),
    [
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}, None, "60"),
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}, 120, "180"),  # the watch names a stopped worker before
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, None, "60"),  # data go over Gloo
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, None, None),  # within the host
    ],
)
def test_over_gloo_workers_wait_longer_for_others(launched, environ, stall_timeout, seconds):
    set_for_user = prepare({**environ, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, stall_timeout)
    assert set_for_user.get("HOROVOD_GLOO_TIMEOUT_SECONDS") == seconds


def test_a_name_that_does_not_resolve_is_named_with_the_remedy(monkeypatch, launched):
    monkeypatch.setattr(environment.socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(EnvironmentFault, match=r"host no-such-host.invalid cannot resolve its own name"):
        check_host(GLOO)


def test_a_worker_of_an_elastic_job_needs_the_interface_although_it_starts_alone():
    with pytest.raises(EnvironmentFault, match="no network interface nothere0"):
        check_host({**ELASTIC, "HOROVOD_GLOO_IFACE": "nothere0"})


@pytest.mark.parametrize("seconds", ["abc", "0"])
def test_a_time_limit_that_horovod_takes_as_none_ends_an_elastic_job_at_once(launched, seconds):
    with pytest.raises(EnvironmentFault, match="HOROVOD_GLOO_TIMEOUT_SECONDS must be a whole number") as seen:
        check_host({**ELASTIC, "HOROVOD_GLOO_TIMEOUT_SECONDS": seconds})
    assert blame_for(seen.value) == "code"  # and no other worker tries it


@pytest.mark.parametrize(
    ("own", "launcher", "local_size", "expected"),
    [
        (16, 16, 5, 3),
        (2, 2, 4, 1),  # more workers than cores
        (1, 16, 4, 1),  # bound to a core
        (4, 16, 2, 4),  # bound to less than the share
    ],
)
def test_a_worker_gets_its_share_of_the_cores(monkeypatch, own, launcher, local_size, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(own)))
    parent = SimpleNamespace(cpu_affinity=lambda: list(range(launcher)))
    monkeypatch.setattr(cores.psutil, "Process", lambda pid: parent)
    assert cores.threads_per_worker(local_size) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # which takes precedence
    assert cores.threads_per_worker(local_size) == 3
