"""Breaking one host of a cluster, and mending it again."""

import importlib.util
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hosts import Cluster, Host
from support.jobs import is_running

NAMES = Path("/etc/hosts")
_OURS = ("python", "python3", "horovodrun", "mpirun", "prterun", "prted", "ssh")


@contextmanager
def instead(host: Host, path: Path, source: Path) -> Iterator[None]:
    """Context in which a host shows another file or folder in the place of ``path``."""
    host.bind(source, path)
    try:
        yield
    finally:
        host.namespaces.succeed("umount", str(path))


@contextmanager
def text_instead(host: Host, path: Path, text: str, folder: Path) -> Iterator[None]:
    """Context in which a host reads another text, put into a folder that it sees, in the place of a file."""
    source = folder / uuid.uuid4().hex
    source.write_text(text)
    source.chmod(0o600 if ".ssh" in path.parts else 0o644)
    with instead(host, path, source):
        yield


def home(host: Host) -> Path:
    """Give the home that ssh and sshd use on a host."""
    return Path(host.run(["sh", "-c", "echo ~"]).stdout.strip())


def text_of(host: Host, path: Path) -> str:
    """Give a file's text as a host sees it."""
    return host.namespaces.succeed("cat", str(path))


def package(name: str) -> Path:
    """Give the folder of an installed package."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent


def without_name(host: Host, name: str) -> str:
    """Give a host's /etc/hosts without one name."""
    lines = text_of(host, NAMES).splitlines(keepends=True)
    return "".join(line for line in lines if name not in line.split())


def without_host_key(host: Host, name: str) -> tuple[Path, str]:
    """Give a host's file of known keys, and its text without those of one host."""
    path = home(host) / ".ssh/known_hosts"
    lines = text_of(host, path).splitlines(keepends=True)
    return path, "".join(line for line in lines if not line.startswith(f"{name},"))


@contextmanager
def without_sshd(host: Host) -> Iterator[None]:
    """Context in which a host takes no ssh connections."""
    host.stop_sshd()
    try:
        yield
    finally:
        host.start_sshd()


@contextmanager
def unplugged(host: Host) -> Iterator[None]:
    """Context in which nothing gets to a host or from it."""
    host.disconnect()
    try:
        yield
    finally:
        host.connect()


@contextmanager
def renamed_interface(host: Host, name: str) -> Iterator[None]:
    """Context in which a host's interface has another name."""

    def rename(old: str, new: str) -> None:
        for words in (["set", old, "down"], ["set", old, "name", new], ["set", new, "up"]):
            host.namespaces.succeed("ip", "link", *words)

    rename("eth0", name)
    try:
        yield
    finally:
        rename(name, "eth0")


@contextmanager
def blocked_ports(host: Host) -> Iterator[None]:
    """Context in which a host's firewall lets only ssh in."""
    rule = ["INPUT", "-i", "eth0", "-p", "tcp", "--syn", "!", "--dport", "22", "-j", "DROP"]
    host.namespaces.succeed("iptables", "-A", *rule)
    try:
        yield
    finally:
        host.namespaces.succeed("iptables", "-D", *rule)


def left_running(cluster: Cluster) -> dict[str, list[str]]:
    """Give what a job left running on its hosts."""
    found: dict[str, list[str]] = {}
    for host in cluster.hosts.values():
        for program in _OURS:
            for pid in host.namespaces.pids(program):
                if pid not in (host.namespaces.pid, os.getpid()) and is_running(pid):
                    found.setdefault(host.name, []).append(program)
    return found
