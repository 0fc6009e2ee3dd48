"""An elastic job below a real Slurm: one srun that outlives its tasks."""

import json
import sys
import time
from pathlib import Path

import pytest
from hosts import Cluster
from slurm_daemons import Slurm
from support.documents import ROOT

from hvdtrain.tools.drill.task import History

WORKER = ROOT / "tests" / "support" / "elastic_worker.py"
SECONDS = 300
# a worker that needs no framework, and one that trains
TOLD_TO_WAIT = f'{sys.executable} {WORKER} "$PWD" wait'
TRAINING = (
    f"{sys.executable} -m hvdtrain --framework torch --task hvdtrain.tools.drill.task:Drill --run-dir run"
)
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --no-kill --output=out.txt
export HVDTRAIN_ELASTIC_STATE=$PWD/state.json
{sys.executable} -m hvdtrain elastic -np 2 --min-np 1 -- \\
    srun --mpi=none --kill-on-bad-exit=0 --no-kill --wait=0 COMMAND &
echo $! >driver.txt
wait $!
echo "ended with $?" >code.txt
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with (
        Cluster({"n1": 1, "n2": 1}, shared=tmp_path_factory.mktemp("shared")) as cluster,
        Slurm(cluster) as one,
    ):
        yield one


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(folder: Path, found) -> None:
    until = time.monotonic() + SECONDS
    while not found():
        assert time.monotonic() < until, read(folder / "out.txt")
        time.sleep(0.1)


def kill(slurm: Slurm, job: str, node: str, signal: str, pid: str) -> None:
    slurm.run(["srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-w", node, "kill", f"-{signal}", pid])


def test_training_goes_on_without_a_killed_task(slurm, tmp_path):
    (tmp_path / "job.sbatch").write_text(SCRIPT.replace("COMMAND", TRAINING))
    job = slurm.submit(["job.sbatch"], tmp_path, PYTHONPATH=str(ROOT))
    wait_for(tmp_path, lambda: len(History.of(tmp_path / "run").steps()) >= 30)
    (lost,) = [one for one in json.loads(read(tmp_path / "state.json"))["members"] if one["rank"] == 1]
    kill(slurm, job, lost["host"], "KILL", str(lost["pid"]))
    wait_for(tmp_path, lambda: read(tmp_path / "code.txt"))
    assert read(tmp_path / "code.txt") == "ended with 0\n", read(tmp_path / "out.txt")
    history = History.of(tmp_path / "run")
    assert history.steps() == list(range(1, history.summary["steps"] + 1))
    assert history.samples() == history.summary["samples"]
    assert [line["left"] for line in history.lines if line["phase"] == "event"] != []


@pytest.mark.parametrize("way", ["killed", "node"])
def test_a_job_goes_on_without_a_lost_worker_and_stops_on_request(slurm, tmp_path, way):
    (tmp_path / "job.sbatch").write_text(SCRIPT.replace("COMMAND", TOLD_TO_WAIT))
    job = slurm.submit(["job.sbatch"], tmp_path, PYTHONPATH=str(ROOT))
    worlds = {name: tmp_path / f"{name}-0.world" for name in ("n1", "n2")}
    wait_for(tmp_path, lambda: all(read(path).startswith("1 ") for path in worlds.values()))
    _, _, _, pid = read(worlds["n2"]).split()
    kill(slurm, job, "n2", "KILL" if way == "killed" else "STOP", pid)
    if way == "node":
        slurm.run(["scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test"])
    wait_for(tmp_path, lambda: read(worlds["n1"]).startswith("2 0 1 "))
    kill(slurm, job, "n1", "TERM", read(tmp_path / "driver.txt").strip())
    wait_for(tmp_path, lambda: read(tmp_path / "code.txt"))
    assert read(tmp_path / "code.txt") == "ended with 75\n", read(tmp_path / "out.txt")
