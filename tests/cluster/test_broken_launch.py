"""Broken clusters under the launcher: the job ends in time, says which host and why, and leaves nothing."""

import re
import time
from pathlib import Path

import jobs
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

LIMIT_SECONDS = 60
BOTH = pytest.mark.parametrize("controller", jobs.CONTROLLERS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster({"h1": 2, "h2": 1}, shared=tmp_path_factory.mktemp("broken")) as cluster:
        yield cluster


def command(cluster: Cluster, controller: str, run_dir: Path, *options: str, hosts: str = "") -> list[str]:
    # what Horovod found out about the hosts before they broke does not count
    launcher = [
        "horovodrun",
        "--disable-cache",
        f"--{controller}",
        "-np",
        "3",
        "-H",
        hosts or cluster.words(),
    ]
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
    assert "Traceback" not in result.output
    nothing_left(cluster)


def nothing_left(cluster: Cluster, seconds: float = 10, *, but: str = "") -> None:
    deadline = time.monotonic() + seconds
    while (
        left := {n: p for n, p in left_running(cluster).items() if n != but}
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_a_key_that_is_not_accepted(cluster, tmp_path):
    host = cluster.hosts["h2"]
    with text_instead(host, home(host) / ".ssh/authorized_keys", "", tmp_path):
        fails(cluster, "gloo", tmp_path, "no ssh to host h2: .*Permission denied")


@BOTH
def test_a_host_key_that_is_not_known_is_refused_with_the_remedy(cluster, tmp_path, controller):
    with text_instead(cluster.head, *without_host_key(cluster.head, "h2"), tmp_path):
        fails(cluster, controller, tmp_path, "no ssh to host h2: Host key", "ssh-keyscan h2")


def test_a_host_without_sshd(cluster, tmp_path):
    with without_sshd(cluster.hosts["h2"]):
        fails(cluster, "gloo", tmp_path, "no ssh to host h2: .*Connection refused")


def test_a_name_that_does_not_resolve(cluster, tmp_path):
    fails(cluster, "gloo", tmp_path, "no ssh to host h9: .*resolve", hosts="h1:2,h9:1")


def test_a_host_that_is_down(cluster, tmp_path):
    with unplugged(cluster.hosts["h2"]):
        fails(cluster, "mpi", tmp_path, "no ssh to host h2: .*(timed out|No route)")


def test_a_host_that_cannot_resolve_its_own_name(cluster, tmp_path):
    h2 = cluster.hosts["h2"]
    with text_instead(h2, NAMES, without_name(h2, "h2"), tmp_path):
        fails(cluster, "gloo", tmp_path, "rank 2 on h2: host h2 cannot resolve its own name", "/etc/hosts")


@BOTH
def test_an_interface_of_another_name(cluster, tmp_path, controller):
    with renamed_interface(cluster.hosts["h2"], "net7"):
        fails(cluster, controller, tmp_path, "net7 10.83.0.2", "of the same name", "0 h1, 1 h2")


@BOTH
def test_an_interface_that_the_user_named_and_a_host_lacks(cluster, tmp_path, controller):
    words = command(cluster, controller, tmp_path / "run")
    words[1:1] = ["--network-interfaces", "eth0"]
    with renamed_interface(cluster.hosts["h2"], "net7"):
        result = cluster.head.run(words, cwd=tmp_path, timeout=LIMIT_SECONDS)
    assert result.returncode == 3, result.output
    assert "host h2 has no network interface eth0" in result.output
    assert "net7 10.83.0.2" in result.output
    nothing_left(cluster)


@BOTH
def test_horovod_without_an_extension(cluster, tmp_path, controller):
    (tmp_path / "empty").mkdir()
    with instead(cluster.hosts["h2"], package("horovod") / "torch", tmp_path / "empty"):
        fails(cluster, controller, tmp_path, "rank 2 on h2: .*no extension for PyTorch")


@BOTH
def test_another_version_of_torch(cluster, tmp_path, controller):
    version = package("torch") / "version.py"
    other = re.sub(r"(__version__ = ')[\d.]+", r"\g<1>1.2.3", version.read_text())
    with text_instead(cluster.hosts["h2"], version, other, tmp_path):
        fails(cluster, controller, tmp_path, r"rank 2 on h2: .*PyTorch 1\.2\.3")


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
        words = command(cluster, "gloo", tmp_path / "run")
        result = cluster.head.run(words, cwd=Path("/mnt/here"), timeout=LIMIT_SECONDS)
    finally:
        inside("umount", "/mnt")
    assert result.returncode == 3, result.output
    assert "host h2 has no folder /mnt/here" in result.output


def test_ports_that_are_blocked(cluster, tmp_path):
    with blocked_ports(cluster.hosts["h2"]):
        fails(cluster, "gloo", tmp_path, "unable to connect|cannot connect|check connectivity", "h2")


@BOTH
def test_a_host_that_goes_away_while_training(cluster, tmp_path, controller):
    words = command(cluster, controller, tmp_path / "run", "--steps", "1000000", "--log-every", "1")
    log = tmp_path / "run" / "metrics.jsonl"
    host = cluster.hosts["h2"]
    with cluster.head.started(words, cwd=tmp_path) as job:
        deadline = time.monotonic() + 90
        while not log.exists() or log.read_text().count("\n") < 5:
            assert job.process.poll() is None, job.result().output
            assert time.monotonic() < deadline, job.result().output
            time.sleep(0.1)
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
    assert "host h2 (rank 2) is gone" in summary["error"]
