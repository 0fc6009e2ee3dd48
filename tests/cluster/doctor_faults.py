"""Faults of a cluster for doctor, each a context: it is there inside, and healed afterwards."""

import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from broken import (
    NAMES,
    blocked_ports,
    home,
    package,
    renamed_interface,
    text_instead,
    text_of,
    unplugged,
    without_host_key,
    without_name,
    without_sshd,
)
from hosts import Cluster, Host

import hvdtrain

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
DOCTOR = ["python", "-m", "hvdtrain", "doctor", "--framework", "torch"]
# so that hosts run this checkout
PYTHONPATH = os.pathsep.join([str(Path(hvdtrain.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
Fault = AbstractContextManager[None]


@contextmanager
def mounted(host: Host, target: Path | str, size: str) -> Iterator[None]:
    """Context with a small, empty file system over a folder on one host."""
    host.namespaces.succeed("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "small", str(target))
    try:
        yield
    finally:
        host.namespaces.succeed("umount", "--lazy", str(target))


def fill(host: Host, folder: Path | str) -> None:
    host.run(["sh", "-c", f"cat /dev/zero >{folder}/full 2>/dev/null"])
    assert int(host.run(["stat", "-f", "-c", "%a", str(folder)]).stdout) == 0


def changed_host_key(cluster: Cluster, folder: Path, name: str) -> Fault:
    """The head knows the key of h3 as that of this host."""
    path = home(cluster.head) / ".ssh/known_hosts"
    lines = {line.partition(",")[0]: line.split() for line in text_of(cluster.head, path).splitlines()}
    lines[name][1:] = lines["h3"][1:]
    text = "".join(" ".join(words) + "\n" for words in lines.values())
    return text_instead(cluster.head, path, text, folder)


def other_torch(cluster: Cluster, folder: Path, name: str) -> Fault:
    version = package("torch") / "version.py"
    text = version.read_text().replace("__version__ = '2.", "__version__ = '1.")
    assert text != version.read_text()
    return text_instead(cluster.hosts[name], version, text, folder)


def missing_extension(cluster: Cluster, folder: Path, name: str) -> Fault:
    """An extension of the host's Horovod is an empty file."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    extension = package("horovod") / f"torch/mpi_lib_v2{suffix}"
    return text_instead(cluster.hosts[name], extension, "", folder)


@contextmanager
def full_shared_memory(cluster: Cluster, folder: Path, name: str) -> Iterator[None]:
    with mounted(cluster.hosts[name], "/dev/shm", "4m"):
        fill(cluster.hosts[name], "/dev/shm")
        yield


@contextmanager
def full_disk(cluster: Cluster, folder: Path, name: str) -> Iterator[None]:
    """The run directory's disk is full."""
    with mounted(cluster.hosts[name], folder / "runs", "1m"):
        fill(cluster.hosts[name], folder / "runs")
        yield


@contextmanager
def clock_ahead(cluster: Cluster, folder: Path, name: str, seconds: int = 10) -> Iterator[None]:
    """All that ssh starts on the host sees another time."""
    host = cluster.hosts[name]
    host.stop_sshd()
    host.start_sshd("-o", f"SetEnv=LD_PRELOAD={FAKETIME} FAKETIME=+{seconds}")
    try:
        yield
    finally:
        host.stop_sshd()
        host.start_sshd()


def _names(host: Host, folder: Path, name: str) -> Fault:
    """One host does not know the name of another, or its own."""
    return text_instead(host, NAMES, without_name(host, name), folder)


# by name, each of the cluster, a private folder that all hosts show, and the name of the host at fault
FAULTS: dict[str, Callable[[Cluster, Path, str], Fault]] = {
    "wrong_key": lambda cluster, folder, name: text_instead(
        cluster.hosts[name], home(cluster.hosts[name]) / ".ssh/authorized_keys", "", folder
    ),
    "unknown_host_key": lambda cluster, folder, name: text_instead(
        cluster.head, *without_host_key(cluster.head, name), folder
    ),
    "changed_host_key": changed_host_key,
    "sshd_down": lambda cluster, folder, name: without_sshd(cluster.hosts[name]),
    "unknown_name": lambda cluster, folder, name: _names(cluster.head, folder, name),
    "host_down": lambda cluster, folder, name: unplugged(cluster.hosts[name]),
    "no_python": lambda cluster, folder, name: mounted(
        cluster.hosts[name], Path(sys.executable).parent, "1m"
    ),
    "own_name_unknown": lambda cluster, folder, name: _names(cluster.hosts[name], folder, name),
    "other_interface_name": lambda cluster, folder, name: renamed_interface(cluster.hosts[name], "net7"),
    "no_working_directory": lambda cluster, folder, name: mounted(cluster.hosts[name], folder.parent, "2g"),
    "ports_blocked": lambda cluster, folder, name: blocked_ports(cluster.hosts[name]),
    "full_shared_memory": full_shared_memory,
    "other_torch": other_torch,
    "missing_extension": missing_extension,
    "clock_ahead": clock_ahead,
    "clock_far_ahead": partial(clock_ahead, seconds=90),
    "full_disk": full_disk,
    "runs_not_shared": lambda cluster, folder, name: mounted(cluster.hosts[name], folder / "runs", "2g"),
}
