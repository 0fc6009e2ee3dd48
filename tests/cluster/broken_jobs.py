"""Training on broken clusters: the job ends in time, says which host and why, and leaves nothing."""

import re
import time
from pathlib import Path

from broken import left_running
from hosts import Cluster

LIMIT_SECONDS = 240  # 5 to 45 on an idle machine; where nobody notices, a job waits for ever


def command(cluster: Cluster, controller: str, run_dir: Path, *options: str, hosts: str = "") -> list[str]:
    """Return the command that trains on all slots of a cluster, or of other hosts."""
    hosts = hosts or cluster.words()
    workers = sum(int(word.partition(":")[2]) for word in hosts.split(","))
    # what Horovod found out about the hosts before they broke does not count
    launcher = ["horovodrun", "--disable-cache", f"--{controller}", "-np", str(workers), "-H", hosts]
    training = ["python", "-m", "hvdtrain", "--framework", "torch", "--run-dir", str(run_dir)]
    return [*launcher, *training, *(options or ("--steps", "30"))]


def fails(cluster: Cluster, controller: str, tmp_path: Path, *told: str, hosts: str = "") -> None:
    """Train on a broken cluster: it must end in time, with this said, and with nothing left."""
    since = time.monotonic()
    words = command(cluster, controller, tmp_path / "run", hosts=hosts)
    result = cluster.head.run(words, cwd=tmp_path, timeout=LIMIT_SECONDS)
    assert time.monotonic() - since < LIMIT_SECONDS
    assert result.returncode == 3, result.output
    for pattern in told:
        assert re.search(pattern, result.output), f"{pattern} is not in:\n{result.output}"
    assert "Traceback" not in result.output, result.output
    nothing_left(cluster)


def nothing_left(cluster: Cluster, seconds: float = LIMIT_SECONDS, *, but: str = "") -> None:
    deadline = time.monotonic() + seconds
    while (
        left := {n: p for n, p in left_running(cluster).items() if n != but}
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
