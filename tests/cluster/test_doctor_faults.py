"""doctor --hostfile on broken clusters names every host and its cause; one examination finds many faults."""

import contextlib
import importlib.machinery
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import broken
import pytest
from broken import NAMES, home, package, text_instead
from hosts import Cluster, Host

import hvdtrain

SECONDS = 300
HOSTS = {"h1": 2, **{f"h{number}": 1 for number in range(2, 10)}}
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


@contextmanager
def full(host: Host, folder: Path | str, size: str) -> Iterator[None]:
    """Context with a full file system there."""
    with mounted(host, folder, size):
        host.run(["sh", "-c", f"cat /dev/zero >{folder}/full 2>/dev/null"])
        assert int(host.run(["stat", "-f", "-c", "%a", str(folder)]).stdout) == 0
        yield


def changed_host_key(cluster: Cluster, host: Host, folder: Path) -> Fault:
    """The head knows the key of h3 as that of this host."""
    path = home(cluster.head) / ".ssh/known_hosts"
    lines = {line.partition(",")[0]: line.split() for line in broken.text_of(cluster.head, path).splitlines()}
    lines[host.name][1:] = lines["h3"][1:]
    text = "".join(" ".join(words) + "\n" for words in lines.values())
    return text_instead(cluster.head, path, text, folder)


def other_torch(cluster: Cluster, host: Host, folder: Path) -> Fault:
    version = package("torch") / "version.py"
    text = version.read_text().replace("__version__ = '2.", "__version__ = '1.")
    assert text != version.read_text()
    return text_instead(host, version, text, folder)


def missing_extension(cluster: Cluster, host: Host, folder: Path) -> Fault:
    """An extension of the host's Horovod is an empty file."""
    extension = package("horovod") / f"torch/mpi_lib_v2{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    return text_instead(host, extension, "", folder)


@contextmanager
def clock_ahead(cluster: Cluster, host: Host, folder: Path, seconds: int = 10) -> Iterator[None]:
    """All that ssh starts on the host sees another time."""
    host.stop_sshd()
    host.start_sshd("-o", f"SetEnv=LD_PRELOAD={FAKETIME} FAKETIME=+{seconds}")
    try:
        yield
    finally:
        host.stop_sshd()
        host.start_sshd()


def unknown_name(host: Host, folder: Path, name: str) -> Fault:
    """One host does not know the name of another, or its own."""
    return text_instead(host, NAMES, broken.without_name(host, name), folder)


# by name, each a context of the cluster, the host at fault, and a private folder that all hosts show
FAULTS: dict[str, Callable[[Cluster, Host, Path], Fault]] = {
    "wrong_key": lambda cluster, host, folder: text_instead(
        host, home(host) / ".ssh/authorized_keys", "", folder
    ),
    "unknown_host_key": lambda cluster, host, folder: text_instead(
        cluster.head, *broken.without_host_key(cluster.head, host.name), folder
    ),
    "changed_host_key": changed_host_key,
    "sshd_down": lambda cluster, host, folder: broken.without_sshd(host),
    "unknown_name": lambda cluster, host, folder: unknown_name(cluster.head, folder, host.name),
    "host_down": lambda cluster, host, folder: broken.unplugged(host),
    "no_python": lambda cluster, host, folder: mounted(host, Path(sys.executable).parent, "1m"),
    "own_name_unknown": lambda cluster, host, folder: unknown_name(host, folder, host.name),
    "other_interface_name": lambda cluster, host, folder: broken.renamed_interface(host, "net7"),
    "no_working_directory": lambda cluster, host, folder: mounted(host, folder.parent, "2g"),
    "ports_blocked": lambda cluster, host, folder: broken.blocked_ports(host),
    "full_shared_memory": lambda cluster, host, folder: full(host, "/dev/shm", "4m"),
    "other_torch": other_torch,
    "missing_extension": missing_extension,
    "clock_ahead": clock_ahead,
    "clock_far_ahead": partial(clock_ahead, seconds=90),
    "full_disk": lambda cluster, host, folder: full(host, folder / "runs", "1m"),
    "runs_not_shared": lambda cluster, host, folder: mounted(host, folder / "runs", "2g"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for all hosts to show, with the jobs' working directory, ``work``, in it."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "work" / "runs").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def cluster(folder):
    with Cluster(HOSTS, shared=folder) as cluster:
        yield cluster


def doctor(cluster, folder, *words, launched=(), faults=()):
    """Run it with faults, pairs of a name and a host; it leaves nothing in the run directory."""
    command, work = [*launched, *DOCTOR, *words], folder / "work"
    with contextlib.ExitStack() as stack:
        for fault, host in faults:
            stack.enter_context(FAULTS[fault](cluster, cluster.hosts[host], work))
        result = cluster.head.run(command, cwd=work, timeout=SECONDS, PYTHONPATH=PYTHONPATH)
    assert list((work / "runs").iterdir()) == []
    return result


def hostfile(folder: Path, *names: str, **slots: int) -> str:
    """Write a host file with some of the hosts, and return its path."""
    path = folder / f"{'-'.join(names)}.txt"
    path.write_text("".join(f"{name} slots={slots.get(name, HOSTS[name])}\n" for name in names))
    return str(path)


def findings(result) -> list[dict]:
    """Return what a report says; a launcher may print more lines."""
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"format"')]
    assert len(lines) == 1, result.output
    return json.loads(lines[0])["findings"]


def wrong(result, verdict: str) -> dict[str, set[str]]:
    """Return the checks with a verdict by host."""
    found: dict[str, set[str]] = {}
    for finding in findings(result):
        if finding["verdict"] == verdict:
            found.setdefault(finding["host"], set()).add(finding["check"])
    return found


def said(result, host: str, check: str) -> str:
    return next(
        f"{f['found']} | {f['remedy']}" for f in findings(result) if (f["host"], f["check"]) == (host, check)
    )


# Faults that one examination finds together: the host at fault, the checks that fail there, and what the
# first of them says. Hosts that are not named are in order.
NOT_REACHED = {
    "wrong_key": ("h2", ["ssh"], "refuses the ssh key"),
    "unknown_host_key": ("h4", ["ssh"], "host key is not known"),
    "changed_host_key": ("h5", ["ssh"], "host key differs from the one known"),
    "sshd_down": ("h6", ["ssh"], "nothing listens on its ssh port"),
    "unknown_name": ("h7", ["name"], "the name h7 does not resolve"),
    "host_down": ("h8", ["ssh"], "it is down"),
    "no_python": ("h9", ["Python"], "there is no /"),
}
NETWORK = {
    "own_name_unknown": ("h2", ["own name"], "its own name, h2, does not resolve there"),
    "other_interface_name": ("h4", ["interface"], "net7, but not eth0, which the others have"),
    "no_working_directory": ("h5", ["working directory"], "is missing there"),
    "ports_blocked": ("h6", ["ports"], "fail (no answer) from h1, h2, h3", "| Let the hosts"),
}
INSTALLED = {
    "full_shared_memory": ("h1", ["/dev/shm"], "No space left"),
    "other_torch": ("h2", ["PyTorch", "Horovod for PyTorch"], "on h1, h3, h4, h5 | Install the same version"),
    "missing_extension": ("h3", ["Horovod for PyTorch"], "file too short"),
    "clock_far_ahead": ("h4", ["clock"], "90.0 s ahead of h1"),
}
FULL_DISK = {"full_disk": ("h1", ["run directory's disk"], "No space left")}
# how many hosts each is examined with
GROUPS = [(NOT_REACHED, 9), (NETWORK, 6), (INSTALLED, 5), (FULL_DISK, 2)]


@pytest.mark.parametrize(("group", "hosts"), GROUPS)
def test_faults_that_stop_jobs_are_named_with_their_hosts_and_nothing_else_is(group, hosts, cluster, folder):
    if "ports_blocked" in group and not shutil.which("iptables"):
        pytest.skip("needs iptables")
    if "clock_far_ahead" in group and not FAKETIME.exists():
        pytest.skip("needs libfaketime (apt install faketime)")
    faults = [(fault, host) for fault, (host, *_) in group.items()]
    names = hostfile(folder, *list(HOSTS)[:hosts])
    result = doctor(cluster, folder, "--hostfile", names, "--json", faults=faults)
    assert result.returncode == 3, wrong(result, "fail")
    assert wrong(result, "fail") == {host: set(checks) for host, checks, *_ in group.values()}
    for host, checks, *texts in group.values():
        assert not [text for text in texts if text not in said(result, host, checks[0])]


@pytest.mark.skipif(not FAKETIME.exists(), reason="needs libfaketime (apt install faketime)")
def test_what_a_job_survives_is_a_warning(cluster, folder):
    cores = len(os.sched_getaffinity(0))
    names = hostfile(folder, "h1", "h2", "h3", "h4", h4=cores + 1)
    faults = [("runs_not_shared", "h2"), ("clock_ahead", "h3")]
    result = doctor(cluster, folder, "--hostfile", names, "--json", faults=faults)
    assert result.returncode == 0, result.output[-3000:]
    assert wrong(result, "warn") == {"h2": {"run directory"}, "h3": {"clock"}, "h4": {"cores"}}
    assert "--resume needs rank 0 on the same host" in said(result, "h2", "run directory")
    assert "10.0 s ahead of h1" in said(result, "h3", "clock")
    assert f"{cores + 1} workers on {cores} cores" in said(result, "h4", "cores")


def test_a_healthy_cluster_is_green(cluster, folder):
    result = doctor(cluster, folder, "-H", "h1:2,h2:1,h3:1")
    assert result.returncode == 0, result.output[-3000:]
    assert "3 hosts: ready\n" in result.stdout
    assert not [word for word in ("FAIL", "warning", " X ", " ! ") if word in result.stdout], result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


LAUNCHED = ("-np", "4", "-H", "h1:2,h2:1,h3:1")


def test_under_the_launcher_a_healthy_cluster_is_green_and_horovod_starts(cluster, folder):
    result = doctor(cluster, folder, launched=("horovodrun", "--mpi", *LAUNCHED))
    assert result.returncode == 0, result.output[-3000:]
    assert result.stdout.count("3 hosts: ready") == 1
    assert result.stdout.count("Horovod starts") == 1
    assert "FAIL" not in result.stdout
    assert "warning" not in result.stdout


@pytest.mark.skipif(not FAKETIME.exists(), reason="needs libfaketime (apt install faketime)")
def test_under_the_launcher_several_faults_are_named_each_with_its_host(cluster, folder):
    faults = [(fault, "h2") for fault in ("other_torch", "runs_not_shared", "own_name_unknown")]
    faults += [("missing_extension", "h3"), ("clock_ahead", "h3")]
    launched = ("horovodrun", "--gloo", *LAUNCHED)
    result = doctor(cluster, folder, "--json", launched=launched, faults=faults)
    assert result.returncode == 3, result.output[-3000:]
    fails = {"h2": {"PyTorch", "Horovod for PyTorch", "own name"}, "h3": {"Horovod for PyTorch"}}
    assert wrong(result, "fail") == fails
    assert wrong(result, "warn") == {"h2": {"run directory"}, "h3": {"clock"}}
