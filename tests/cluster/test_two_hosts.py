"""Small jobs on two hosts: of `hvdtrain.launch`, of torchrun, and with a secret in the environment."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster_jobs import YIELDING
from hosts import Cluster
from support import jobs


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster({"h1": 1, "h2": 1}, shared=tmp_path_factory.mktemp("shared")) as cluster:
        yield cluster


SCRIPT = """
import socket

import hvdtrain

GREETING = "from"


def work():
    summary = hvdtrain.train("digits", framework="torch", steps=2, threads=1, quiet=True, run_dir="{run}")
    print("WORKER", socket.gethostname(), flush=True)
    return GREETING, socket.gethostname(), summary.workers


def fails():
    if socket.gethostname() == "h2":
        raise ValueError("only there")
    return work()


print("FOUND", *hvdtrain.launch(work, hosts="{hosts}", controller="gloo"))
try:
    hvdtrain.launch(fails, hosts="{hosts}", controller="gloo")
except hvdtrain.errors.WorkerFailure as error:
    print("CAUGHT", error.problem)
"""


def test_a_function_runs_on_two_hosts_which_send_back_what_it_returned_or_raised(cluster, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(hosts=cluster.words(), run=tmp_path / "run"))
    result = cluster.head.run(["python", str(script)], cwd=tmp_path, **YIELDING)
    assert result.returncode == 0, result.output[-5000:]
    for line in ("FOUND from h1 2", "WORKER h1", "WORKER h2", "CAUGHT rank 1 on h2: ValueError: only there"):
        assert f"{line}\n" in result.stdout


TRAIN = ["-m", "hvdtrain", "--framework", "torch", "--steps", "5", "--run-dir", "run"]
AGENT = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "h1"]


def test_workers_that_one_torchrun_on_each_host_starts_find_each_other(cluster, tmp_path):
    def start(number: int) -> jobs.Result:
        command = [*AGENT, "--master-port", "29711", "--node-rank", str(number), *TRAIN]
        return cluster.hosts[f"h{number + 1}"].run(command, cwd=tmp_path, OMP_NUM_THREADS="1")

    with ThreadPoolExecutor() as threads:
        first, second = threads.map(start, range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.output + second.output
    assert "2 on 2 hosts (h1: 1, h2: 1), coordinated by Gloo" in first.stdout
    assert "done:" not in second.stdout


SECRET = "rosebud-7f3a9c"


@pytest.mark.parametrize("controller", jobs.CONTROLLERS)
def test_a_secret_is_neither_printed_nor_on_a_command_line(cluster, tmp_path, controller):
    """It reaches the workers, and nothing that others can read."""
    run = tmp_path / "run"
    launcher = ["horovodrun", "--verbose", f"--{controller}", "-np", "2", "-H", cluster.words()]
    training = ["python", "-m", "hvdtrain", "--framework", "torch", "--steps", "40", "--debug"]
    words = [*launcher, *training, "--run-dir", str(run)]
    with cluster.head.started(words, cwd=tmp_path, MY_API_TOKEN=SECRET) as job:
        shown, arrived = _watch(job, os.readlink(f"/proc/{cluster.hosts['h2'].namespaces.pid}/ns/net"))
        result = job.wait(jobs.LIMIT_SECONDS)
    assert result.returncode == 0, result.output
    assert not shown, "the secret is on command lines"
    assert arrived, "the worker on the other host did not get it"
    assert SECRET not in result.output
    for path in run.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def _watch(job: jobs.started, network: str) -> tuple[set[str], bool]:
    """Give the command lines that showed the secret, and whether a worker in this network had it."""
    shown: set[str] = set()
    arrived = False
    deadline = time.monotonic() + jobs.LIMIT_SECONDS
    while job.process.poll() is None and time.monotonic() < deadline:
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    words = (folder / "cmdline").read_bytes()
                    if SECRET.encode() in words:
                        shown.add(words.replace(b"\0", b" ").decode(errors="replace")[:300])
                    if b"hvdtrain" in words and not arrived and os.readlink(folder / "ns/net") == network:
                        arrived = f"MY_API_TOKEN={SECRET}".encode() in (folder / "environ").read_bytes()
                except OSError:
                    pass
        time.sleep(0.02)
    return shown, arrived
