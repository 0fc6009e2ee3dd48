"""Hosts that the launcher cannot use: the job ends in time, says which host and why, and leaves nothing."""

import contextlib
from pathlib import Path

import pytest
from broken import (
    NAMES,
    blocked_ports,
    home,
    instead,
    renamed_interface,
    text_instead,
    unplugged,
    without_host_key,
    without_name,
    without_sshd,
)
from broken_jobs import LIMIT_SECONDS, command, fails, nothing_left
from hosts import Cluster
from support import jobs


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
    words = command(cluster, "mpi", tmp_path / "run")
    words[1:1] = ["--network-interfaces", "eth0"]
    with renamed_interface(cluster.hosts["h2"], "net7"):
        result = cluster.head.run(words, cwd=tmp_path, timeout=LIMIT_SECONDS)
    assert result.returncode == 3, result.output
    assert "host h2 has no network interface eth0" in result.output
    assert "net7 10.83.0.2" in result.output
    nothing_left(cluster)


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
