"""Jobs of examples/slurm on a real Slurm: stopped by it in every way, and taken up where they were."""

import os
import signal
from pathlib import Path

import pytest
from cluster_jobs import YIELDING
from hosts import Cluster
from slurm_daemons import ENDED, GRACE_SECONDS, Slurm
from support.documents import ROOT
from support.jobs import Run
from support.resumed_tasks import RELEASED
from support.resuming import (
    TASKS,
    checkpoint_files,
    command_for,
    content_of,
    finished,
    last_step,
    logged,
    trained_steps,
)

SCRIPT = str(ROOT / "examples" / "slurm" / "train.sbatch")
STEPS = 50
OPTIONS = (
    *("--steps", str(STEPS), "--batch-size", "3", "--accumulate", "2", "--save-every", "1000"),
    *("--set", "threads=1", "--set", "trace_indices=true"),
)
HELD_FROM = 10  # the step from which on a job takes its time, until something has happened to it
SLOW = {**YIELDING, "HVDTRAIN_TEST_SAMPLE_SECONDS": "0.015", "HVDTRAIN_TEST_HELD_FROM": str(HELD_FROM)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster({"n1": 2, "n2": 2}, shared=tmp_path_factory.mktemp("shared")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slurm(cluster):
    with Slurm(cluster) as slurm:
        yield slurm


@pytest.fixture(autouse=True)
def _no_job_stays(request):
    """Cancel what a test that failed has left in the queue: the next one needs the nodes."""
    yield
    if "slurm" in request.fixturenames:
        request.getfixturevalue("slurm").run(["scancel", "--user=root"])


@pytest.fixture
def grace(request, slurm):
    """Seconds that the partition grants a preempted job; without, Slurm's own wait before it kills."""
    slurm.run(["scontrol", "update", "PartitionName=batch", f"GraceTime={request.param}"])
    yield
    slurm.run(["scontrol", "update", "PartitionName=batch", f"GraceTime={GRACE_SECONDS}"])


def submitted(slurm: Slurm, folder: Path, *options: str) -> str:
    """Submit a job on both nodes that takes its time; give its number."""
    task = ("--task", f"{TASKS}:Fit", "--framework", "torch", "--run-dir", "run")
    return slurm.submit([SCRIPT, *task, *OPTIONS, *options], folder, **SLOW)


def preempt(slurm: Slurm, folder: Path, job: str) -> None:
    """Let a job of higher priority take all nodes, and see it end; then the first one may be quick."""
    assert slurm.state(job) == "RUNNING"
    words = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    other = slurm.submit(words, folder)
    assert slurm.await_end(other) == "COMPLETED"
    (folder / RELEASED).touch()


def trains(slurm: Slurm, folder: Path, job: str) -> None:
    """Wait until a job has done some steps; it has most of them still to do."""
    slurm.await_that(lambda: last_step(folder) >= 3 or slurm.state(job) in ENDED, f"job {job} trains")
    assert slurm.state(job) not in ENDED, slurm.output(folder, job)


def completed(slurm: Slurm, folder: Path, job: str) -> None:
    """Wait for a job's good end."""
    state = slurm.await_end(job)
    assert state == "COMPLETED", f"{state}: {slurm.output(folder, job)}"


def is_worker(pid: int) -> bool:
    return b"hvdtrain" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The uninterrupted run."""
    return finished(
        command_for(2, "mpi", "Fit", "--framework", "torch", *OPTIONS), tmp_path_factory.mktemp("alone")
    )


@pytest.mark.usefixtures("grace")
@pytest.mark.parametrize("grace", [60, 0], indirect=True)
def test_preempted_and_requeued_it_ends_with_the_result_of_the_uninterrupted_run(slurm, tmp_path, alone):
    job = submitted(slurm, tmp_path)
    trains(slurm, tmp_path, job)
    preempt(slurm, tmp_path, job)
    completed(slurm, tmp_path, job)

    said, preempted = slurm.output(tmp_path, job), Run(tmp_path / "run", None)
    assert slurm.shown(job)["Restarts"] == "1"
    assert said.count("2 on 2 hosts (n1: 1, n2: 1), coordinated by MPI") == 2
    assert "SIGTERM came" in said
    assert said.count("starts from") == 1
    assert trained_steps(preempted) == list(range(1, STEPS + 1))
    assert logged(preempted) == logged(alone)
    assert checkpoint_files(preempted) == checkpoint_files(alone)
    assert content_of(preempted.folder / "indices") == content_of(alone.folder / "indices")


def test_preempted_before_it_trains_it_is_requeued(slurm, tmp_path):
    job = submitted(slurm, tmp_path, "--steps", "3")
    slurm.await_state(job, "RUNNING", timeout=300)
    preempt(slurm, tmp_path, job)
    completed(slurm, tmp_path, job)
    assert slurm.shown(job)["Restarts"] == "1"


def test_a_worker_that_is_killed_ends_the_job(slurm, tmp_path, cluster):
    job = submitted(slurm, tmp_path)
    trains(slurm, tmp_path, job)
    (worker,) = (pid for pid in cluster.hosts["n2"].namespaces.pids("python") if is_worker(pid))
    os.kill(worker, signal.SIGKILL)
    assert slurm.await_end(job) == "FAILED"
    assert slurm.shown(job)["Restarts"] == "0"


def test_srun_without_pmix_is_refused(slurm, tmp_path):
    words = ["--nodes=2", "--ntasks-per-node=1", "python", "-m", "hvdtrain", "--framework", "torch"]
    result = slurm.tried(["srun", "--mpi=none", *words, "--run-dir", "alone"], tmp_path, **YIELDING)
    assert result.returncode == 3, result.output
    assert result.output.count("srun started 2 processes (by SLURM_STEP_NUM_TASKS)") == 1
    assert "srun --mpi=pmix" in result.output
    assert not (tmp_path / "alone").exists()
