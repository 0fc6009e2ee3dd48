"""The Slurm section of docs/clusters.md, its commands in order on a real Slurm."""

import json
import re
from pathlib import Path

import pytest
from cluster_jobs import YIELDING
from documents import ROOT, blocks
from hosts import Cluster
from slurm_daemons import Slurm

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
LIMIT_SECONDS = 90
# The worker that has trained ends with the job's file; a job of 30 epochs still has most of them to do
LONG, SHORT = "--epochs 30", "--epochs 2"


@pytest.fixture
def slurm(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with Cluster({"n1": 4, "n2": 4}, shared=tmp_path) as cluster, Slurm(cluster) as slurm:
        yield slurm


def scripts(folder: Path) -> list[str]:
    """Give the section's shell blocks, in order."""
    text = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (folder / "section.md").write_text(text.partition("\n## Slurm\n")[2].partition("\n## ")[0])
    return [block.text for block in blocks(folder / "section.md") if block.language == "bash"]


def said_by(slurm: Slurm, script: str, folder: Path, job: str = "") -> str:
    return slurm.run(["bash", "-euc", script], folder, **YIELDING, job=job, HVDTRAIN_THREADS="1")


def summary(folder: Path, job: str) -> dict:
    return json.loads((folder / "runs" / f"slurm-{job}" / "summary.json").read_text())


def trains(slurm: Slurm, folder: Path, job: str) -> None:
    """Wait until a job has trained since it was last started."""
    parts = int(slurm.shown(job)["Restarts"]) + 1
    slurm.await_that(lambda: output(folder, job).count("\neval  step") >= parts, LIMIT_SECONDS)


def output(folder: Path, job: str) -> str:
    path = folder / f"slurm-{job}.out"
    return path.read_text() if path.exists() else ""


def test_the_section_from_the_first_command_to_a_job_that_another_took_up(slurm, tmp_path):
    asks, submits, stops, takes_up, cards = scripts(tmp_path)
    assert "pmix" in said_by(slurm, asks, tmp_path)

    said = said_by(slurm, f'{submits}\necho "number $job"', tmp_path)
    (job,) = re.findall(r"number (\d+)", said)
    slurm.await_state(job, "RUNNING", timeout=LIMIT_SECONDS)
    trains(slurm, tmp_path, job)
    said_by(slurm, stops, tmp_path, job)
    slurm.await_that(lambda: slurm.shown(job)["Restarts"] == "1", LIMIT_SECONDS)
    stopped = summary(tmp_path, job)
    assert (stopped["status"], stopped["error"]) == ("stopped", "SIGUSR2 came")

    slurm.await_that(lambda: "starts from" in output(tmp_path, job), LIMIT_SECONDS)
    trains(slurm, tmp_path, job)
    said = said_by(slurm, takes_up.replace(LONG, SHORT), tmp_path, job)
    (other,) = re.findall(r"Submitted batch job (\d+)", said)
    assert slurm.await_state(job, *ENDED, timeout=LIMIT_SECONDS) == "CANCELLED"
    assert slurm.await_state(other, *ENDED, timeout=LIMIT_SECONDS) in ENDED
    print(output(tmp_path, other))
    assert slurm.state(job) == "CANCELLED"  # a job that is put back would have shown it by now
