"""Hosts whose workers cannot train, or go away while they do: the job says which, and leaves nothing."""

import re
import time
from contextlib import contextmanager

import pytest
from broken import instead, left_running, package, text_instead, unplugged
from broken_jobs import LIMIT_SECONDS, command, fails, nothing_left
from hosts import Cluster
from support import jobs

BOTH = pytest.mark.parametrize("controller", jobs.CONTROLLERS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster({"h1": 2, "h2": 1}, shared=tmp_path_factory.mktemp("broken")) as cluster:
        yield cluster


def test_horovod_without_an_extension(cluster, tmp_path):
    (tmp_path / "empty").mkdir()
    with instead(cluster.hosts["h2"], package("horovod") / "torch", tmp_path / "empty"):
        fails(cluster, "mpi", tmp_path, "rank 2 on h2: .*no extension for PyTorch")


def test_another_version_of_torch(cluster, tmp_path):
    version = package("torch") / "version.py"
    other = re.sub(r"(__version__ = ')[\d.]+", r"\g<1>1.2.3", version.read_text())
    with text_instead(cluster.hosts["h2"], version, other, tmp_path):
        fails(cluster, "gloo", tmp_path, r"rank 2 on h2: .*PyTorch 1\.2\.3")


@contextmanager
def training(cluster, controller, tmp_path):
    """Context with a job that trains until something ends it."""
    words = command(cluster, controller, tmp_path / "run", "--steps", "1000000", "--log-every", "1")
    log = tmp_path / "run" / "metrics.jsonl"
    with cluster.head.started(words, cwd=tmp_path) as job:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not log.exists() or log.read_text().count("\n") < 5:
            assert job.process.poll() is None, job.result().output
            assert time.monotonic() < deadline, job.result().output
            time.sleep(0.1)
        yield job


@pytest.mark.parametrize(("host", "program"), [("h1", "ssh"), ("h2", "prted")])
def test_a_killed_ssh_client_or_daemon_of_mpirun_is_no_success(cluster, tmp_path, host, program):
    with training(cluster, "mpi", tmp_path) as job:
        cluster.hosts[host].namespaces.kill(program)
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 3, result.output
    assert re.search(r"horovodrun: .*rank 2 \(host h2, slot 0\) ended before", result.output)
    nothing_left(cluster)


@BOTH
def test_a_host_that_goes_away_while_training(cluster, tmp_path, controller):
    host = cluster.hosts["h2"]
    with training(cluster, controller, tmp_path) as job:
        with unplugged(host):
            result = job.wait(LIMIT_SECONDS)
            nothing_left(cluster, but="h2")
            # the host itself gives up, too: its worker at once, Open MPI's daemon somewhat later
            deadline = time.monotonic() + LIMIT_SECONDS
            while any(p.startswith("python") for p in left_running(cluster).get("h2", [])):
                assert time.monotonic() < deadline
                time.sleep(0.2)
        host.namespaces.kill("prted")
    assert result.returncode == 3, result.output
    assert "rank 0 on h1: host h2 (rank 2) is gone" in result.output
    summary = jobs.Run(tmp_path / "run", result).summary
    assert summary["status"] == "failed"
    # the folder is shared, so the host that is cut off may write last
    assert re.search(r"host (h2 \(rank 2\)|h1 \(ranks 0, 1\)) is gone", summary["error"])
