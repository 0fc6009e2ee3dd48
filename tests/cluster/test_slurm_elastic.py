"""An elastic job below a real Slurm: one srun that outlives its tasks; its workers need no framework."""

import sys
import time
from pathlib import Path

import pytest
from hosts import Cluster
from slurm_daemons import Slurm
from support.documents import ROOT

WORKER = ROOT / "tests" / "support" / "elastic_worker.py"
SECONDS = 60
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --no-kill --output=out.txt
{sys.executable} -m hvdtrain elastic -np 2 --min-np 1 -- \\
    srun --mpi=none --kill-on-bad-exit=0 --no-kill --wait=0 {sys.executable} {WORKER} "$PWD" wait &
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


@pytest.mark.parametrize("way", ["killed", "node"])
def test_a_job_goes_on_without_a_lost_worker_and_stops_on_request(slurm, tmp_path, way):
    (tmp_path / "job.sbatch").write_text(SCRIPT)
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
