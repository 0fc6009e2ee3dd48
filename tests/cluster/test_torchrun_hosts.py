"""torchrun on two hosts: one command on each of them."""

from concurrent.futures import ThreadPoolExecutor

from hosts import Cluster
from support import jobs

TRAIN = ["-m", "hvdtrain", "--framework", "torch", "--steps", "5", "--run-dir", "run"]
AGENT = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "n1"]


def test_workers_on_two_hosts_find_each_other(tmp_path_factory):
    shared = tmp_path_factory.mktemp("shared")
    with Cluster({"n1": 1, "n2": 1}, shared=shared) as cluster, ThreadPoolExecutor() as threads:

        def start(number: int) -> jobs.Result:
            command = [*AGENT, "--master-port", "29711", "--node-rank", str(number), *TRAIN]
            host = cluster.hosts[f"n{number + 1}"]
            return host.run(command, cwd=shared, OMP_NUM_THREADS="1")

        first, second = threads.map(start, range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.output + second.output
    assert "2 on 2 hosts (n1: 1, n2: 1), coordinated by Gloo" in first.stdout
    assert "done:" not in second.stdout
