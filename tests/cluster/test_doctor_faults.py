"""doctor --hostfile on broken clusters names every host and its cause; one examination finds many faults."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import doctor_faults as faults
import pytest
from hosts import Cluster

SECONDS = 300
HOSTS = {"h1": 2, **{f"h{number}": 1 for number in range(2, 10)}}


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


def doctor(cluster: Cluster, folder: Path, *words: str, launched: tuple[str, ...] = ()):
    command = [*launched, *faults.DOCTOR, *words]
    return cluster.head.run(command, cwd=folder / "work", timeout=SECONDS, PYTHONPATH=faults.PYTHONPATH)


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
    if "clock_far_ahead" in group and not faults.FAKETIME.exists():
        pytest.skip("needs libfaketime (apt install faketime)")
    with contextlib.ExitStack() as broken:
        for fault, (host, *_) in group.items():
            broken.enter_context(faults.FAULTS[fault](cluster, folder / "work", host))
        names = hostfile(folder, *list(HOSTS)[:hosts])
        result = doctor(cluster, folder, "--hostfile", names, "--json")
    assert result.returncode == 3, wrong(result, "fail")
    assert wrong(result, "fail") == {host: set(checks) for host, checks, *_ in group.values()}
    for host, checks, *texts in group.values():
        assert not [text for text in texts if text not in said(result, host, checks[0])]


@pytest.mark.skipif(not faults.FAKETIME.exists(), reason="needs libfaketime (apt install faketime)")
def test_what_a_job_survives_is_a_warning(cluster, folder):
    cores = len(os.sched_getaffinity(0))
    work = folder / "work"
    names = hostfile(folder, "h1", "h2", "h3", "h4", h4=cores + 1)
    with faults.FAULTS["runs_not_shared"](cluster, work, "h2"), faults.clock_ahead(cluster, work, "h3"):
        result = doctor(cluster, folder, "--hostfile", names, "--json")
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


@pytest.mark.skipif(not faults.FAKETIME.exists(), reason="needs libfaketime (apt install faketime)")
def test_under_the_launcher_several_faults_are_named_each_with_its_host(cluster, folder):
    work = folder / "work"
    broken = {"h2": ("other_torch", "runs_not_shared", "own_name_unknown")}
    broken["h3"] = ("missing_extension", "clock_ahead")
    with contextlib.ExitStack() as stack:
        for host, names in broken.items():
            for name in names:
                stack.enter_context(faults.FAULTS[name](cluster, work, host))
        result = doctor(cluster, folder, "--json", launched=("horovodrun", "--gloo", *LAUNCHED))
    assert result.returncode == 3, result.output[-3000:]
    fails = {"h2": {"PyTorch", "Horovod for PyTorch", "own name"}, "h3": {"Horovod for PyTorch"}}
    assert wrong(result, "fail") == fails
    assert wrong(result, "warn") == {"h2": {"run directory"}, "h3": {"clock"}}


def test_nothing_is_left_in_the_run_directory(cluster, folder):
    assert list((folder / "work" / "runs").iterdir()) == []
