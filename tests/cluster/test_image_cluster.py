"""Three hosts that have nothing but the image, its keys and a run directory in common train digits."""

import json

import pytest
from hosts import Cluster
from support.jobs import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(image_root, folder):
    with Cluster({"head": 1, "worker1": 1, "worker2": 1}, root=image_root, shared=folder) as cluster:
        yield cluster


def test_hosts_of_an_image_share_no_files(cluster, folder):
    for name, host in cluster.hosts.items():
        said = host.run(["sh", "-euc", "echo $0 >>/work/name; cat /work/name; hostname; id -un", name]).stdout
        assert said.split() == [name, name, "hvdtrain"]
        assert host.run(["ls", __file__]).returncode != 0
        assert host.run(["ls", str(folder)]).returncode == 0


@pytest.mark.parametrize(("framework", "controller"), [("torch", "gloo"), ("tf", "mpi")])
def test_digits_trains_on_hosts_of_an_image(framework, controller, cluster, folder):
    launch = ["horovodrun", f"--{controller}", "-np", "3", "-H", cluster.words()]
    train = ["python", "-m", "hvdtrain", "--framework", framework, "--run-dir", str(folder / framework)]
    command = ["hvdtrain-entrypoint", "head", *launch, *train, "--set", "threads=1", "--epochs", "5"]
    result = cluster.head.run(command, timeout=500, OMPI_MCA_mpi_yield_when_idle="1")
    assert result.returncode == 0, result.output[-5000:]
    assert "3 on 3 hosts (head: 1, worker1: 1, worker2: 1)" in result.stdout
    run = Run(folder / framework, result)
    assert run.summary["status"] == "completed"
    assert run.summary["final"]["accuracy"] >= 0.8
    assert (run.folder / "summary.json").stat().st_uid == folder.stat().st_uid != 0


@pytest.mark.parametrize("way", ["ssh", "--gloo", "--mpi"])
def test_the_doctor_finds_nothing_that_would_stop_a_job(way, cluster, folder):
    hosts = ["-H", cluster.words()]
    doctor = ["python", "-m", "hvdtrain", "doctor", "--json", "--run-dir", str(folder / "runs")]
    launched = ["horovodrun", way, "-np", "3", *hosts, *doctor]
    words = [*doctor, *hosts] if way == "ssh" else launched
    result = cluster.head.run(["hvdtrain-entrypoint", "head", *words], timeout=300)
    said = next((line for line in result.stdout.splitlines() if line.startswith('{"format"')), "{}")
    found = json.loads(said)
    assert [host["name"] for host in found.get("hosts", [])] == list(cluster.hosts), result.output[-5000:]
    assert [finding for finding in found["findings"] if finding["verdict"] == "fail"] == []
    assert result.returncode == 0
