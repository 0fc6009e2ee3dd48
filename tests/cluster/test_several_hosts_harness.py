"""The harness itself: hosts are apart, answer one another, and are gone afterwards."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster({"h1": 2, "h2": 1}, shared=tmp_path_factory.mktemp("shared"), rate="200mbit") as cluster:
        yield cluster


def ssh(cluster: Cluster, name: str, *words: str, seconds: int = 60):
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds}", name, *words]
    return cluster.head.run(command)


def test_hosts_have_names_addresses_and_homes_of_their_own(cluster):
    for name, host in cluster.hosts.items():
        assert host.run(["hostname"]).stdout.strip() == name
        assert host.address in host.run(["ip", "-brief", "address", "show", "eth0"]).stdout
        host.run(["touch", f"/dev/shm/{name}"])
        assert host.run(["sh", "-c", "echo $0 >~/name; cat ~/name; ls /dev/shm", name]).stdout.split() == [
            name,
            name,
        ]


def test_ssh_checks_the_keys_of_hosts(cluster):
    assert "stricthostkeychecking ask" in cluster.head.run(["ssh", "-G", "h2"]).stdout
    assert ssh(cluster, "h2", "hostname").stdout == "h2\n"
    keys = cluster.head.run(["sh", "-c", "cat ~/.ssh/known_hosts"]).stdout.split()
    assert len(set(keys[2::3])) == len(cluster.hosts)


def test_links_carry_what_they_are_told(cluster):
    shown = cluster.head.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    assert "tbf" in shown
    assert "rate 200Mbit" in shown


def test_a_file_can_differ_on_one_host(cluster, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "theirs").write_text("theirs")
    cluster.hosts["h2"].bind(tmp_path / "mine", tmp_path / "theirs")
    texts = [host.run(["cat", str(tmp_path / "theirs")]).stdout for host in cluster.hosts.values()]
    assert texts == ["theirs", "mine"]


def test_a_host_without_its_cable_does_not_answer(cluster):
    cluster.hosts["h2"].disconnect()
    try:
        assert ssh(cluster, "h2", "true", seconds=1).returncode == 255
    finally:
        cluster.hosts["h2"].connect()
    assert ssh(cluster, "h2", "true").returncode == 0


def test_a_host_without_sshd_refuses(cluster):
    cluster.hosts["h2"].stop_sshd()
    try:
        assert "Connection refused" in ssh(cluster, "h2", "true").stderr
    finally:
        cluster.hosts["h2"].start_sshd()
    assert ssh(cluster, "h2", "true").returncode == 0


KILLED = """
import sys, time
from pathlib import Path
from hosts import Cluster

with Cluster({"h1": 1, "h2": 1}, shared=Path(sys.argv[1])) as cluster:
    cluster.hosts["h2"].run(["sh", "-c", "sleep 1000 & echo $! >" + sys.argv[1] + "/pid"])
    time.sleep(1000)
"""


def test_nothing_is_left_of_a_cluster_whose_test_was_killed(tmp_path):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=environ)
    try:
        wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        pid = int((tmp_path / "pid").read_text())
        assert Path(f"/proc/{pid}").exists()
        assert list(tmp_path.glob("hvdtrain-hosts-*"))
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    wait(lambda: not Path(f"/proc/{pid}").exists() and not list(tmp_path.glob("hvdtrain-hosts-*")))


def wait(done) -> None:
    deadline = time.monotonic() + 180
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
