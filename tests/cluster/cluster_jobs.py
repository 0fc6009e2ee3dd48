"""Training on the hosts of a cluster."""

from pathlib import Path

from hosts import Cluster
from support.jobs import LIMIT_SECONDS, Run

# The hosts of a test share the machine's cores: one compute thread each, and nobody holds a core waiting.
SMALL = ("--set", "threads=1")
YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1"}


def launcher(cluster: Cluster, controller: str) -> list[str]:
    """Give the words before ``python`` that start a worker on every slot of a cluster."""
    workers = str(sum(host.slots for host in cluster.hosts.values()))
    if controller == "mpirun":
        return ["mpirun", "-np", workers, "-H", cluster.words(), "--bind-to", "none", "-x", "PATH"]
    return ["horovodrun", f"--{controller}", "-np", workers, "-H", cluster.words()]


def train(
    cluster: Cluster, launch: list[str], *options: str, folder: Path, timeout: float = LIMIT_SECONDS
) -> Run:
    """Train from the cluster's head to the good end, in a folder that all hosts see."""
    command = [*launch, "python", "-m", "hvdtrain", *options, *SMALL, "--run-dir", str(folder / "run")]
    result = cluster.head.run(command, cwd=folder, timeout=timeout, **YIELDING)
    assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.output[-5000:]}"
    return Run(folder / "run", result)
