"""Sums between two hosts: exact, repeatable, once over a host's link; and a worker is lost meanwhile."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from cluster_jobs import SMALL, YIELDING, launcher
from hosts import Cluster
from support.jobs import CONTROLLERS, LIMIT_SECONDS

# Sums small whole numbers of all types, then the same fractions again and again, and counts what travels.
PROGRAM = """
from pathlib import Path
import horovod.torch as hvd
import torch

hvd.init()
ranks = range(hvd.size())

def numbers(rank, kind, count):
    return torch.randint(0, 8, (count,), generator=torch.Generator().manual_seed(rank)).to(kind)

for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
    for count in (3, 700_001):
        found = hvd.allreduce(numbers(hvd.rank(), kind, count), op=hvd.Sum, name=f"{kind} {count}")
        assert torch.equal(found, sum(numbers(rank, kind, count) for rank in ranks)), (kind, count)
assert hvd.allreduce(numbers(hvd.rank(), torch.int32, 700_001), op=hvd.Max)[5] == max(
    numbers(rank, torch.int32, 700_001)[5] for rank in ranks)
fractions = torch.randn(2_000_003, generator=torch.Generator().manual_seed(hvd.rank()))
counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
first, before = hvd.allreduce(fractions, name="repeated"), int(counter.read_text())
for repeat in range(10):
    assert torch.equal(hvd.allreduce(fractions, name="repeated"), first)
sent = int(counter.read_text()) - before
assert torch.equal(hvd.broadcast(first, 0), first)
if hvd.rank() == 0:
    print(f"sent {sent / 10 / 4 / len(fractions):.3f} of the data; gloo: {hvd.gloo_enabled()}")
"""


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_sums_of_two_hosts_with_two_workers_are_exact_and_cross_a_link_once(tmp_path, controller):
    with Cluster({"h1": 2, "h2": 2}, shared=tmp_path) as cluster:
        command = [*launcher(cluster, controller), sys.executable, "-c", PROGRAM]
        result = cluster.head.run(command, cwd=tmp_path, timeout=LIMIT_SECONDS, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.output
    words = result.stdout.partition("sent ")[2].split()
    assert 0.95 < float(words[0]) <= 1.05  # 2 (H - 1) / H; a ring of four workers sends 1.5
    assert words[-1] == "True"


GPT = "{model: gpt, layers: 2, channels: 512, heads: 4, context: 16, vocabulary: 65}"  # 25 MB of gradients


def test_a_worker_that_is_killed_while_gradients_travel_is_named_with_its_host(tmp_path):
    """Over Gloo: over MPI it is mpirun that says so, which kills the others at once."""
    with Cluster({"h1": 1, "h2": 1}, rate="100mbit", shared=tmp_path) as cluster:
        words = [*launcher(cluster, "gloo"), "python", "-m", "hvdtrain", "--framework", "torch", *SMALL]
        words += ["--task", "synthetic", "--set", f"task_options={GPT}", "--batch-size", "4"]
        words += ["--steps", "9999", "--log-every", "1", "--run-dir", str(tmp_path / "run")]
        log = tmp_path / "run" / "metrics.jsonl"
        with cluster.head.started(words, cwd=tmp_path, **YIELDING) as job:
            job.until(lambda: log.exists() and '"step": 2,' in log.read_text())
            time.sleep(0.5)  # a step sends 25 MB, for 2 s
            for pid in cluster.hosts["h2"].namespaces.pids("python"):
                if b"--log-every" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
            result = job.wait(60)
    assert result.returncode not in (None, 0), result.output
    assert "during the backward pass (overlap)" in result.output
    assert "rank 1 on h2 ended without a message" in result.output
