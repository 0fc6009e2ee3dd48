"""doctor --hostfile on broken clusters: it names the host and the cause."""

import json
import os
import shutil
from pathlib import Path

import doctor_faults as faults
import pytest
from hosts import Cluster

SECONDS = 60  # within which every cluster must be seen through


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return faults.new_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def cluster(folder):
    with Cluster(faults.SLOTS, shared=folder) as cluster:
        yield cluster


def doctor(cluster: Cluster, folder: Path, *words: str):
    words = (*faults.DOCTOR, *words)
    return cluster.head.run(list(words), cwd=folder / "work", timeout=SECONDS, PYTHONPATH=faults.PYTHONPATH)


def document(result) -> dict:
    assert result.stdout.startswith("{"), result.output
    return json.loads(result.stdout)


def wrong(result, verdict: str) -> dict[str, set[str]]:
    """Give the checks with a verdict by host."""
    found: dict[str, set[str]] = {}
    for finding in document(result)["findings"]:
        if finding["verdict"] == verdict:
            found.setdefault(finding["host"], set()).add(finding["check"])
    return found


def said(result, host: str, check: str) -> str:
    findings = document(result)["findings"]
    return next(f"{f['found']} | {f['remedy']}" for f in findings if (f["host"], f["check"]) == (host, check))


# fault: host, checks that fail there, and what the first of them says
FAILING = {
    "wrong_key": ("h2", ["ssh"], "refuses the ssh key"),
    "unknown_host_key": ("h2", ["ssh"], "host key is not known"),
    "changed_host_key": ("h2", ["ssh"], "host key is another than the one known"),
    "sshd_down": ("h2", ["ssh"], "nothing listens on its ssh port"),
    "unknown_name": ("h2", ["name"], "the name h2 does not resolve"),
    "own_name_unknown": ("h2", ["own name"], "its own name, h2, does not resolve there"),
    "other_interface_name": ("h2", ["interface"], "net7, but not eth0, which the others have"),
    "other_torch": ("h2", ["PyTorch", "Horovod for PyTorch"], "on h1, h3 | Install the same version"),
    "missing_extension": ("h3", ["Horovod for PyTorch"], "file too short"),
    "full_shared_memory": ("h1", ["/dev/shm"], "No space left"),
    "full_disk": ("h1", ["run directory's disk"], "No space left"),
    "no_python": ("h2", ["Python"], "there is no /"),
    "no_working_directory": ("h2", ["working directory"], "is missing there"),
    "host_down": ("h2", ["ssh"], "it is down"),
    "ports_blocked": ("h2", ["ports"], "fail (no answer) from h1, h3 | Let the hosts"),
}


@pytest.mark.parametrize("fault", FAILING)
def test_a_fault_that_stops_jobs_is_named_with_its_host(fault, cluster, folder):
    host, checks, cause = FAILING[fault]
    if fault == "ports_blocked" and not shutil.which("iptables"):
        pytest.skip("needs iptables")
    with getattr(faults, fault)(cluster, folder / "work"):
        result = doctor(cluster, folder, "--hostfile", str(cluster.hostfile), "--quick", "--json")
    assert result.returncode == 3, wrong(result, "fail")
    assert wrong(result, "fail") == {host: set(checks)}
    assert cause in said(result, host, checks[0])


def test_a_run_directory_that_is_not_shared_is_a_warning(cluster, folder):
    with faults.runs_not_shared(cluster, folder / "work"):
        result = doctor(cluster, folder, "--hostfile", str(cluster.hostfile), "--quick", "--json")
    assert result.returncode == 0, result.output[-3000:]
    assert wrong(result, "warn") == {"h2": {"run directory"}}
    assert "--resume needs rank 0 on the same host" in said(result, "h2", "run directory")


@pytest.mark.skipif(not faults.FAKETIME.exists(), reason="needs libfaketime (apt install faketime)")
@pytest.mark.parametrize(("seconds", "verdict", "code"), [(10, "warn", 0), (90, "fail", 3)])
def test_a_clock_that_is_ahead_is_named(seconds, verdict, code, cluster, folder):
    with faults.clock_ahead(cluster, folder, seconds):
        result = doctor(cluster, folder, "--hostfile", str(cluster.hostfile), "--quick", "--json")
    assert result.returncode == code, result.output[-3000:]
    assert wrong(result, verdict) == {"h3": {"clock"}}
    assert f"{seconds}.0 s ahead of h1" in said(result, "h3", "clock")


def test_more_slots_than_cores_are_a_warning(cluster, folder):
    cores = len(os.sched_getaffinity(0))
    result = doctor(cluster, folder, "-H", f"h1:1,h2:{cores + 1}", "--quick", "--json")
    assert result.returncode == 0, result.output[-3000:]
    assert wrong(result, "warn")["h2"] == {"cores"}
    assert f"{cores + 1} workers on {cores} cores" in said(result, "h2", "cores")


@pytest.mark.skipif(not faults.CGROUP.is_dir(), reason="needs the cpu controller of cgroup v1")
def test_a_slow_host_is_a_warning_with_its_ratio(cluster, folder):
    with faults.slow_host(cluster, folder):
        result = doctor(cluster, folder, "--hostfile", str(cluster.hostfile), "--json")
    assert result.returncode == 0, result.output[-3000:]
    assert wrong(result, "warn")["h3"] >= {"compute"}
    assert "times slower than the median: it got" in said(result, "h3", "compute")
    assert "Another load" in said(result, "h3", "compute")


def test_a_healthy_cluster_is_green(cluster, folder):
    result = doctor(cluster, folder, "--hostfile", str(cluster.hostfile), "--quick")
    assert result.returncode == 0, result.output[-3000:]
    assert "3 hosts: ready\n" in result.stdout
    assert not [word for word in ("FAIL", "warning", " X ", " ! ") if word in result.stdout], result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_nothing_is_left_in_the_run_directory(cluster, folder):
    assert list((folder / "work" / "runs").iterdir()) == []
