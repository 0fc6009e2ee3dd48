"""Faults of a cluster, each a context: it is there inside, and healed afterwards.

Every function takes the cluster and a private folder that all hosts show; a fault is injected on h2
unless it says otherwise.
"""

import importlib.machinery
import importlib.util
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hosts import Cluster, Host

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
CGROUP = Path("/sys/fs/cgroup/cpu")


@contextmanager
def replaced(host: Host, target: Path | str, text: str | Path, folder: Path) -> Iterator[None]:
    """Show another text, or another file or folder, in a file's place on one host."""
    source = text
    if isinstance(text, str):
        source = folder / uuid.uuid4().hex
        source.write_text(text)
        source.chmod(0o600 if ".ssh" in str(target) else 0o644)
    host.bind(Path(source), Path(target))
    try:
        yield
    finally:
        host.namespaces.succeed("umount", str(target))


@contextmanager
def mounted(host: Host, target: Path | str, size: str) -> Iterator[None]:
    """Put a small, empty file system over a folder on one host."""
    host.namespaces.succeed("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "small", str(target))
    try:
        yield
    finally:
        host.namespaces.succeed("umount", "--lazy", str(target))


def fill(host: Host, folder: Path | str) -> None:
    host.run(["sh", "-c", f"cat /dev/zero >{folder}/full 2>/dev/null"])
    assert int(host.run(["stat", "-f", "-c", "%a", str(folder)]).stdout) == 0


def ssh_file(host: Host, name: str) -> tuple[Path, str]:
    path = host.run(["sh", "-c", f"echo ~/.ssh/{name}"]).stdout.strip()
    return Path(path), host.run(["cat", path]).stdout


@contextmanager
def wrong_key(cluster: Cluster, folder: Path) -> Iterator[None]:
    h2 = cluster.hosts["h2"]
    with replaced(h2, ssh_file(h2, "authorized_keys")[0], "", folder):
        yield


@contextmanager
def unknown_host_key(cluster: Cluster, folder: Path) -> Iterator[None]:
    path, text = ssh_file(cluster.head, "known_hosts")
    kept = "".join(line for line in text.splitlines(True) if not line.startswith("h2,"))
    with replaced(cluster.head, path, kept, folder):
        yield


@contextmanager
def changed_host_key(cluster: Cluster, folder: Path) -> Iterator[None]:
    path, text = ssh_file(cluster.head, "known_hosts")
    lines = {line.partition(",")[0]: line.split() for line in text.splitlines()}
    lines["h2"][1:] = lines["h3"][1:]
    text = "".join(" ".join(words) + "\n" for words in lines.values())
    with replaced(cluster.head, path, text, folder):
        yield


@contextmanager
def sshd_down(cluster: Cluster, folder: Path) -> Iterator[None]:
    cluster.hosts["h2"].stop_sshd()
    try:
        yield
    finally:
        cluster.hosts["h2"].start_sshd()


def without_name(host: Host, name: str) -> str:
    lines = host.run(["cat", "/etc/hosts"]).stdout.splitlines(True)
    return "".join(line for line in lines if name not in line.split())


@contextmanager
def unknown_name(cluster: Cluster, folder: Path) -> Iterator[None]:
    with replaced(cluster.head, "/etc/hosts", without_name(cluster.head, "h2"), folder):
        yield


@contextmanager
def own_name_unknown(cluster: Cluster, folder: Path) -> Iterator[None]:
    h2 = cluster.hosts["h2"]
    with replaced(h2, "/etc/hosts", without_name(h2, "h2"), folder):
        yield


def rename(host: Host, old: str, new: str) -> None:
    for words in (["dev", old, "down"], ["dev", old, "name", new], ["dev", new, "up"]):
        host.namespaces.succeed("ip", "link", "set", *words)


@contextmanager
def other_interface_name(cluster: Cluster, folder: Path) -> Iterator[None]:
    rename(cluster.hosts["h2"], "eth0", "net7")
    try:
        yield
    finally:
        rename(cluster.hosts["h2"], "net7", "eth0")


def package(name: str) -> Path:
    return Path(importlib.util.find_spec(name).origin).parent


@contextmanager
def other_torch(cluster: Cluster, folder: Path) -> Iterator[None]:
    version = package("torch") / "version.py"
    text = version.read_text().replace("__version__ = '2.", "__version__ = '1.")
    assert text != version.read_text()
    with replaced(cluster.hosts["h2"], version, text, folder):
        yield


@contextmanager
def missing_extension(cluster: Cluster, folder: Path) -> Iterator[None]:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    extension = package("horovod") / f"torch/mpi_lib_v2{suffix}"
    with replaced(cluster.hosts["h3"], extension, "", folder):
        yield


@contextmanager
def full_shared_memory(cluster: Cluster, folder: Path) -> Iterator[None]:
    with mounted(cluster.head, "/dev/shm", "4m"):
        fill(cluster.head, "/dev/shm")
        yield


@contextmanager
def full_disk(cluster: Cluster, folder: Path) -> Iterator[None]:
    """The run directory's disk on the head is full."""
    with mounted(cluster.head, folder / "runs", "1m"):
        fill(cluster.head, folder / "runs")
        yield


@contextmanager
def no_python(cluster: Cluster, folder: Path) -> Iterator[None]:
    (folder / "empty").mkdir(exist_ok=True)
    with replaced(cluster.hosts["h2"], Path(sys.executable).parent, folder / "empty", folder):
        yield


@contextmanager
def runs_not_shared(cluster: Cluster, folder: Path) -> Iterator[None]:
    with mounted(cluster.hosts["h2"], folder / "runs", "2g"):
        yield


@contextmanager
def no_working_directory(cluster: Cluster, folder: Path) -> Iterator[None]:
    with mounted(cluster.hosts["h2"], folder.parent, "2g"):
        yield


@contextmanager
def host_down(cluster: Cluster, folder: Path) -> Iterator[None]:
    cluster.hosts["h2"].disconnect()
    try:
        yield
    finally:
        cluster.hosts["h2"].connect()


@contextmanager
def ports_blocked(cluster: Cluster, folder: Path) -> Iterator[None]:
    """A firewall that lets ssh through and drops connections to all other ports."""
    rule = ["INPUT", "-i", "eth0", "-p", "tcp", "--syn", "--dport", "1024:65535", "-j", "DROP"]
    cluster.hosts["h2"].namespaces.succeed("iptables", "-A", *rule)
    try:
        yield
    finally:
        cluster.hosts["h2"].namespaces.succeed("iptables", "-D", *rule)


@contextmanager
def clock_ahead(cluster: Cluster, folder: Path, seconds: int = 10) -> Iterator[None]:
    """All that ssh starts on h3 sees another time."""
    h3 = cluster.hosts["h3"]
    setting = f"SetEnv=LD_PRELOAD={FAKETIME} FAKETIME=+{seconds}"
    sshd = h3._files.sshd
    h3.stop_sshd()
    h3._files.sshd.extend(["-o", setting])
    h3.start_sshd()
    try:
        yield
    finally:
        h3.stop_sshd()
        del sshd[-2:]
        h3.start_sshd()


@contextmanager
def slow_host(cluster: Cluster, folder: Path) -> Iterator[None]:
    """All that ssh starts on h3 gets a tenth of a core."""
    group = CGROUP / f"hvdtrain-{uuid.uuid4().hex}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("10000")
        (group / "cpu.cfs_period_us").write_text("100000")
        for pid in cluster.hosts["h3"].namespaces.pids("sshd"):
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        cluster.hosts["h3"].stop_sshd()
        cluster.hosts["h3"].start_sshd()
        for pid in (group / "cgroup.procs").read_text().split():
            (CGROUP / "cgroup.procs").write_text(pid)
        group.rmdir()
