"""What launchers state in the environment, and the refusal if Horovod does not see their processes."""

from types import SimpleNamespace

import psutil
import pytest

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host import launcher as launches
from hvdtrain.host.launcher import Launch, check_launch_is_seen, output_rank, stated_launch

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
    monkeypatch.setattr(launches.os, "environ", environ)
    monkeypatch.setattr(launches, "stated_launch", lambda: stated_launch(environ))
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
