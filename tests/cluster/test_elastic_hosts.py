"""Elastic jobs on several hosts over real ssh: workers that come, go, freeze and cannot be reached."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from hosts import Cluster
from support.documents import ROOT

WORKER = ROOT / "tests" / "support" / "elastic_worker.py"
SECONDS = 300
SOON_SECONDS = 60  # 3 on an idle machine; a connection to a host that is cut off is tried for more than 100
HOROVODRUN = Path(sys.executable).with_name("horovodrun")
# starts a process on h2, says when it ends; kills what standard input names
STARTER = """
import sys, threading, time
from hvdtrain.elastic.driver.records import Slot
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.elastic.driver.clusters import HostCluster
if __name__ == "__main__":
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(300)"
    hosts = [HostSlots("h2", 1)]
    cluster = HostCluster([sys.executable, "-c", code], "k", lambda: hosts, environ={})
    ended = threading.Event()
    process = cluster.start("w1", Slot("h2", 0), lambda code: ended.set())
    while True:
        time.sleep(0.05)
        try:
            way, pid, since = open("order").read().split()
        except (FileNotFoundError, ValueError):
            continue
        cluster.kill_far("h2", int(pid), float(since)) if way == "far" else process.kill()
        print("ended" if ended.wait(200) else "runs", cluster.address_for("h2"), flush=True)
        break
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster({"h1": 1, "h2": 1, "h3": 1}, shared=tmp_path_factory.mktemp("shared")) as cluster:
        yield cluster


@pytest.fixture
def folder(cluster, tmp_path_factory):
    """A folder that all hosts have."""
    return tmp_path_factory.mktemp("job")


def read(path):
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("way", ["far", "cut"])
def test_a_frozen_process_is_killed_over_ssh_and_a_lost_host_holds_nobody_up(cluster, folder, way):
    (folder / "start.py").write_text(STARTER)
    with cluster.head.started([sys.executable, "start.py"], cwd=folder, PYTHONPATH=str(ROOT)) as job:
        job.until(lambda: read(folder / "pid"))
        pid = int(read(folder / "pid"))
        since = psutil.Process(pid).create_time()
        os.kill(pid, signal.SIGSTOP)
        try:
            if way == "cut":
                cluster.hosts["h2"].disconnect()
            began = time.monotonic()
            (folder / "order").write_text(f"{way} {pid} {since!r}")
            result = job.wait(SECONDS)
            assert result.stdout.splitlines()[-1] == f"ended {cluster.head.address}", result.output
            assert time.monotonic() - began < SOON_SECONDS
            assert psutil.pid_exists(pid) == (way == "cut")
        finally:
            cluster.hosts["h2"].connect()
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


def test_workers_come_and_go_with_the_hosts(cluster, folder):
    hosts = folder / "hosts"
    hosts.write_text("h1:1\nh2:1\n")
    options = ["-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", f"cat {hosts}"]
    words = [str(HOROVODRUN), *options, sys.executable, str(WORKER), str(folder), "wait"]

    def in_world(generation):
        worlds = {path.stem: read(path).split() for path in folder.glob("*.world")}
        return {name: world for name, world in worlds.items() if world[:1] == [str(generation)]}

    with cluster.head.started(words, cwd=folder, PYTHONPATH=str(ROOT)) as job:
        job.until(lambda: len(in_world(1)) == 2)
        (lost,) = [world for name, world in in_world(1).items() if world[1] == "1"]
        hosts.write_text("h1:1\nh3:1\n")  # h2 is to leave; its worker is killed before it can
        os.kill(int(lost[3]), signal.SIGKILL)
        job.until(lambda: any(len(in_world(generation)) == 2 for generation in (2, 3, 4)))
        job.process.send_signal(signal.SIGTERM)
        result = job.wait(SECONDS)
    assert result.returncode == 75, result.output
    assert "h3" in "".join(read(path) for path in folder.glob("*.json"))


@pytest.mark.timeout(900)
def test_a_drill_on_hosts_loses_nothing(cluster, folder):
    """With PyTorch, which starts soon; test_elastic_jobs.py has jobs of TensorFlow."""
    words = [sys.executable, "-m", "hvdtrain", "drill", "-H", "h1:1,h2:1", "--framework", "torch"]
    options = ["--folder", str(folder / "drill"), "--json", str(folder / "drill.json")]
    result = cluster.head.run([*words, *options], cwd=folder, timeout=800, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.output[-6000:]
    assert json.loads(read(folder / "drill.json"))["lost"] == 0
