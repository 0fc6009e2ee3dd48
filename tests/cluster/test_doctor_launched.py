"""doctor under the launcher, on hosts."""

import json
from pathlib import Path

import doctor_faults as faults
import pytest
from hosts import Cluster

SECONDS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return faults.new_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def cluster(folder):
    with Cluster(faults.SLOTS, shared=folder) as cluster:
        yield cluster


def launched(cluster: Cluster, folder: Path, controller: str, *words: str):
    command = ["horovodrun", f"--{controller}", "-np", "4", "-H", cluster.words(), *faults.DOCTOR, *words]
    return cluster.head.run(command, cwd=folder / "work", timeout=SECONDS, PYTHONPATH=faults.PYTHONPATH)


def documented(result) -> dict:
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"format"')))


def test_a_healthy_cluster_is_green_and_horovod_starts(cluster, folder):
    result = launched(cluster, folder, "mpi")
    assert result.returncode == 0, result.output[-3000:]
    assert result.stdout.count("3 hosts: ready") == 1
    assert result.stdout.count("Horovod starts") == 1
    assert "FAIL" not in result.stdout
    assert "warning" not in result.stdout


def test_several_faults_are_named_each_with_its_host(cluster, folder):
    work = folder / "work"
    with (
        faults.other_torch(cluster, work, "h2"),
        faults.missing_extension(cluster, work, "h3"),
        faults.runs_not_shared(cluster, work, "h2"),
        faults.clock_ahead(cluster, work, "h3"),
        faults.own_name_unknown(cluster, work, "h2"),
    ):
        result = launched(cluster, folder, "gloo", "--json")
    assert result.returncode == 3, result.output[-3000:]
    found = {(f["host"], f["check"], f["verdict"]) for f in documented(result)["findings"]}
    assert {one for one in found if one[2] != "ok"} == {
        ("h2", "PyTorch", "fail"),
        ("h2", "Horovod for PyTorch", "fail"),
        ("h3", "Horovod for PyTorch", "fail"),
        ("h2", "own name", "fail"),
        ("h2", "run directory", "warn"),
        ("h3", "clock", "warn"),
    }
