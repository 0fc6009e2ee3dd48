"""The Slurm section of docs/slurm.md, its commands in order on a real Slurm."""

import json
import re
from pathlib import Path

import pytest
from cluster_jobs import YIELDING
from hosts import Cluster
from slurm_daemons import Slurm
from support.documents import ROOT, blocks

from hvdtrain.cli import cli

NODES = ("n1", "n2", "n3", "n4")  # the command for GPUs asks for four


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture(scope="module")
def slurm(shared):
    with Cluster(dict.fromkeys(NODES, 4), shared=shared) as cluster, Slurm(cluster) as slurm:
        yield slurm


def scripts(folder: Path) -> list[str]:
    """Return the page's shell blocks, in order."""
    return [block.text for block in blocks(ROOT / "docs" / "slurm.md") if block.language == "bash"]


def said_by(slurm: Slurm, script: str, folder: Path, job: str = "") -> str:
    return slurm.run(["bash", "-euc", script], folder, **YIELDING, job=job)


def summary(folder: Path, job: str) -> dict:
    return json.loads((folder / "runs" / f"slurm-{job}" / "summary.json").read_text())


def trains(slurm: Slurm, folder: Path, job: str) -> None:
    """Wait until a job has trained since it was last started."""
    slurm.await_that(
        lambda: "eval  step" in slurm.output(folder, job).rpartition("set for you")[2], f"job {job} trains"
    )


def test_the_section_from_the_first_command_to_a_job_that_another_took_up(slurm, shared):
    asks, examines, submits, stops, takes_up, _ = scripts(shared)
    assert "pmix" in said_by(slurm, asks, shared)
    if "doctor" in cli.commands:
        assert "2 hosts: ready" in said_by(slurm, examines, shared)

    said = said_by(slurm, f'{submits}\necho "number $job"', shared)
    (job,) = re.findall(r"number (\d+)", said)
    trains(slurm, shared, job)
    said_by(slurm, stops, shared, job)
    slurm.await_that(lambda: slurm.shown(job)["Restarts"] == "1", f"job {job} is requeued")
    assert summary(shared, job)["status"] == "stopped"

    slurm.await_that(lambda: "starts from" in slurm.output(shared, job), f"job {job} goes on")
    trains(slurm, shared, job)
    cancels, _, submits = takes_up.partition("\n")
    said_by(slurm, cancels, shared, job)
    assert slurm.await_end(job) == "CANCELLED"
    stopped = summary(shared, job)
    assert (stopped["status"], stopped["error"]) == ("stopped", "SIGTERM came")

    short = submits.replace("--epochs 30", f"--steps {stopped['steps'] + 5}")
    (other,) = re.findall(r"Submitted batch job (\d+)", said_by(slurm, short, shared, job))
    assert slurm.await_end(other) == "COMPLETED"
    assert summary(shared, job)["status"] == "completed"
    assert "workers        2 on 1 host (n1: 2)" in slurm.output(shared, other)
    assert f"step {stopped['steps']}" in slurm.output(shared, other)
    assert slurm.state(job) == "CANCELLED"  # one that were put back would have shown it by now


def test_slurm_takes_the_command_for_gpus(slurm, shared):
    words = scripts(shared)[-1].split()
    assert words[0] == "sbatch"
    slurm.run(["sbatch", "--test-only", *words[1:]], shared)
    more = [word.replace("gpus-per-node=4", "gpus-per-node=5") for word in words[1:]]
    refused = slurm.tried(["sbatch", "--test-only", *more], shared)
    assert refused.returncode
    assert "node configuration is not available" in refused.output
