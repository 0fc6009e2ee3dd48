"""Broken clusters: a job ends in time, says which host and why, and leaves nothing."""

import contextlib
import re
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from broken import (
    NAMES,
    blocked_ports,
    home,
    instead,
    left_running,
    package,
    renamed_interface,
    text_instead,
    unplugged,
    without_host_key,
    without_name,
    without_sshd,
)
from hosts import Cluster
from support import jobs

LIMIT_SECONDS = 240  # 5 to 45 on an idle machine; where nobody notices, a job waits for ever


def command(cluster: Cluster, controller: str, run_dir: Path, *options: str, hosts: str = "") -> list[str]:
    """Return the command that trains on all slots of a cluster, or of other hosts."""
    hosts = hosts or cluster.words()
    workers = sum(int(word.partition(":")[2]) for word in hosts.split(","))
    # what Horovod found out about the hosts before they broke does not count
    launcher = ["horovodrun", "--disable-cache", f"--{controller}", "-np", str(workers), "-H", hosts]
    training = ["python", "-m", "hvdtrain", "--framework", "torch", "--run-dir", str(run_dir)]
    return [*launcher, *training, *(options or ("--steps", "30"))]


def fails(cluster, controller, tmp_path, *told, hosts="", launch=(), cwd=None) -> None:
    """Train on a broken cluster: it must end in time, with this said, and with nothing left."""
    since = time.monotonic()
    words = command(cluster, controller, tmp_path / "run", hosts=hosts)
    words[1:1] = launch
    result = cluster.head.run(words, cwd=cwd or tmp_path, timeout=LIMIT_SECONDS)
    assert time.monotonic() - since < LIMIT_SECONDS
    assert result.returncode == 3, result.output
    for pattern in told:
        assert re.search(pattern, result.output), f"{pattern} is not in:\n{result.output}"
    assert "Traceback" not in result.output, result.output
    nothing_left(cluster)


def nothing_left(cluster: Cluster, *, but: str = "") -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while left_running(cluster).keys() - {but}:
        assert time.monotonic() < deadline, left_running(cluster)
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster({"h1": 2, "h2": 1}, shared=tmp_path_factory.mktemp("broken")) as cluster:
        yield cluster


def test_all_hosts_that_ssh_does_not_get_to_are_named_each_with_its_reason(tmp_path):
    """They are tried before the controller counts."""
    slots = {"h1": 2, "h2": 1, "h3": 1, "h4": 1, "h5": 1}
    with Cluster(slots, shared=tmp_path) as cluster, contextlib.ExitStack() as broken:
        refuses = cluster.hosts["h2"]
        broken.enter_context(text_instead(refuses, home(refuses) / ".ssh/authorized_keys", "", tmp_path))
        broken.enter_context(text_instead(cluster.head, *without_host_key(cluster.head, "h3"), tmp_path))
        broken.enter_context(without_sshd(cluster.hosts["h4"]))
        broken.enter_context(unplugged(cluster.hosts["h5"]))
        said = (
            "no ssh to host h2: .*Permission denied",
            "no ssh to host h3: Host key",
            "ssh-keyscan h3",
            "no ssh to host h4: .*Connection refused",
            "no ssh to host h5: .*(timed out|No route)",
            "no ssh to host h9: .*resolve",  # it has no address
        )
        fails(cluster, "mpi", tmp_path, *said, hosts=f"{cluster.words()},h9:1")


def test_a_host_that_cannot_resolve_its_own_name(cluster, tmp_path):
    h2 = cluster.hosts["h2"]
    with text_instead(h2, NAMES, without_name(h2, "h2"), tmp_path):
        fails(cluster, "gloo", tmp_path, "rank 2 on h2: host h2 cannot resolve its own name", "/etc/hosts")


def test_an_interface_of_another_name(cluster, tmp_path):
    with renamed_interface(cluster.hosts["h2"], "net7"):
        fails(cluster, "gloo", tmp_path, "net7 10.83.0.2", "of the same name", "0 h1, 1 h2")


def test_an_interface_that_the_user_named_and_a_host_lacks(cluster, tmp_path):
    told = ("host h2 has no network interface eth0", "net7 10.83.0.2")
    with renamed_interface(cluster.hosts["h2"], "net7"):
        fails(cluster, "mpi", tmp_path, *told, launch=["--network-interfaces", "eth0"])


def test_a_python_that_is_not_there(cluster, tmp_path):
    (tmp_path / "python").write_text("no program\n")
    python = (jobs.BIN / "python").resolve()
    with instead(cluster.hosts["h2"], python, tmp_path / "python"):
        fails(cluster, "gloo", tmp_path, "host h2: Horovod cannot start there")


def test_a_working_directory_that_a_host_lacks(cluster, tmp_path):
    inside = cluster.head.namespaces.succeed
    inside("mount", "-t", "tmpfs", "tmpfs", "/mnt")
    try:
        inside("mkdir", "/mnt/here")
        fails(cluster, "gloo", tmp_path, "host h2 has no folder /mnt/here", cwd=Path("/mnt/here"))
    finally:
        inside("umount", "/mnt")


def test_ports_that_are_blocked(cluster, tmp_path):
    with blocked_ports(cluster.hosts["h2"]):
        fails(cluster, "gloo", tmp_path, "unable to connect|cannot connect|check connectivity", "h2")


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
        job.until(lambda: log.exists() and log.read_text().count("\n") >= 5, LIMIT_SECONDS)
        yield job


@pytest.mark.parametrize(("host", "program"), [("h1", "ssh"), ("h2", "prted")])
def test_a_killed_ssh_client_or_daemon_of_mpirun_is_no_success(cluster, tmp_path, host, program):
    with training(cluster, "mpi", tmp_path) as job:
        cluster.hosts[host].namespaces.kill(program)
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 3, result.output
    assert re.search(r"horovodrun: .*rank 2 \(host h2, slot 0\) ended before", result.output)
    nothing_left(cluster)


@pytest.mark.parametrize("controller", jobs.CONTROLLERS)
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
