"""Processes of workers: their start, signals and end; where their driver listens; a world's rendezvous."""

import http.client
import json
import os
import queue
import signal
import socket
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import psutil
import pytest
from support.elastic_driver import eventually

pytest.importorskip("horovod.runner.gloo_run", reason="Horovod is not installed")

from horovod.runner.common.util import safe_shell_exec
from horovod.runner.http import http_auth

from hvdtrain.elastic.driver import clusters
from hvdtrain.elastic.driver.clusters import HostCluster, WorldStore
from hvdtrain.elastic.driver.records import Slot
from hvdtrain.errors import UsageError
from hvdtrain.host.hostfile import HostSlots

HERE = Slot("localhost", 1)
SECONDS = 120


def cluster(*hosts, command=(), **options):
    return HostCluster(command, "secret key", lambda: [HostSlots(host, 1) for host in hosts], **options)


def start(code, slot=HERE, worker="w7", **options):
    """Start a worker that runs Python code; return it and a queue of its exit code."""
    ends = queue.Queue()
    one = cluster("localhost", command=[sys.executable, "-c", code], **options)
    one.addresses = [("127.0.0.1", 99)]
    return one.start(worker, slot, ends.put), ends


def wait_for(path):
    return eventually(lambda: path.exists() and path.read_text())


def writes_environment(path):
    """Return code that writes its environment."""
    return f"import json, os; json.dump(dict(os.environ), open({str(path)!r}, 'w'))"


def waits(path, before=""):
    """Return code that writes its process id and waits."""
    write = f"open({str(path)!r} + '.new', 'w').write(str(os.getpid())); "
    return (
        f"import os, signal, time; {before}{write}os.rename({f'{path}.new'!r}, {str(path)!r}); time.sleep(60)"
    )


def test_a_worker_has_its_environment_and_no_rank(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOROVOD_RANK", "3")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    _, ends = start(f"{writes_environment(tmp_path / 'found')}; print('hello')")
    assert ends.get(timeout=SECONDS) == 0
    found = json.loads((tmp_path / "found").read_text())
    expected = {"HVDTRAIN_ELASTIC": "127.0.0.1:99", "HVDTRAIN_WORKER": "w7", "HVDTRAIN_SLOT": "1"}
    expected |= {"HOROVOD_HOSTNAME": "localhost", "HOROVOD_RENDEZVOUS_KEY": "secret key"}
    expected |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "PYTHONHASHSEED": "0"}
    assert {name: found.get(name) for name in expected} == expected
    assert not {"HOROVOD_RANK", "HOROVOD_SIZE"} & set(found)
    assert "[w7]<stdout>:hello" in capfd.readouterr().out


def test_output_also_goes_to_a_folder_of_the_worker_and_the_exit_code_is_its_own(tmp_path):
    _, ends = start("print('hello'); raise SystemExit(75)", output_filename=str(tmp_path / "deep" / "out"))
    assert ends.get(timeout=SECONDS) == 75
    assert (tmp_path / "deep" / "out" / "rank.w7" / "stdout").read_text().endswith("hello\n")


def test_a_stopped_worker_is_killed_and_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_GRACEFUL_TERMINATION_SECONDS", "600")
    for name in ("GRACEFUL_TERMINATION_TIME_S", "FAILURE_TERMINATION_TIME_S"):
        monkeypatch.setattr(safe_shell_exec, name, 600)
    stops = "os.setpgid(0, 0); "
    one, one_ends = start(waits(tmp_path / "one", stops), worker="w1")
    _, other_ends = start(waits(tmp_path / "other"), worker="w2")
    pid, other = int(wait_for(tmp_path / "one")), int(wait_for(tmp_path / "other"))
    os.kill(pid, signal.SIGSTOP)
    since = time.monotonic()
    one.kill()
    assert one_ends.get(timeout=SECONDS) == -9
    assert time.monotonic() - since < 60
    assert psutil.pid_exists(other)
    cluster("localhost").kill_far("localhost", other, psutil.Process(other).create_time())
    assert other_ends.get(timeout=SECONDS) == -9


def test_sigterm_lets_a_worker_end_in_order(tmp_path):
    ends_in_order = "signal.signal(signal.SIGTERM, lambda *_: os._exit(75)); "
    process, ends = start(waits(tmp_path / "pid", ends_in_order))
    wait_for(tmp_path / "pid")
    process.signal(signal.SIGTERM)
    assert ends.get(timeout=SECONDS) == 75


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """An ssh that runs its command here, as a shell of another host would, and notes its own command line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "ssh"
    path.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/ssh.log\nwhile [ "$1" != h9 ]; do shift; done\nshift\n'
        'while case "$1" in -?) ;; *) false ;; esac; do shift 2; done\n'
        'exec env -i PATH="$PATH" /bin/sh -c "$*"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(clusters, "is_this_host", lambda host: host != "h9")
    return tmp_path / "ssh.log"


def test_another_host_is_reached_over_ssh_and_nothing_secret_is_on_its_command_line(ssh, tmp_path):
    _, ends = start(writes_environment(tmp_path / "found"), Slot("h9", 0), ssh_port=2222)
    assert ends.get(timeout=SECONDS) == 0
    found = json.loads((tmp_path / "found").read_text())
    assert (found["HVDTRAIN_WORKER"], found["HVDTRAIN_SLOT"]) == ("w7", "0")
    assert found["HOROVOD_RENDEZVOUS_KEY"] == "secret key"
    assert "secret" not in ssh.read_text()
    assert "-p 2222" in ssh.read_text()


def test_a_process_of_another_host_is_killed_over_ssh_if_it_is_the_same(ssh, tmp_path):
    _, ends = start(waits(tmp_path / "pid"))
    pid = int(wait_for(tmp_path / "pid"))
    began = psutil.Process(pid).create_time()
    cluster("localhost").kill_far("h9", pid, began - 60)
    for thread in [one for one in threading.enumerate() if one.name == f"end of process {pid}"]:
        thread.join()
    assert psutil.pid_exists(pid)
    cluster("localhost").kill_far("h9", pid, began)
    assert ends.get(timeout=SECONDS) == -9


def test_the_connection_to_a_lost_host_is_ended(ssh, tmp_path):
    process, ends = start(waits(tmp_path / "pid"), Slot("h9", 0))
    wait_for(tmp_path / "pid")
    process.kill()  # the fake ssh has become the worker, as far as its launcher sees
    assert ends.get(timeout=SECONDS) < 0


@pytest.fixture
def networks(monkeypatch):
    """Two networks, and a host in each that is not this one."""
    routes = {"h1": "10.1.0.1", "h2": "10.2.0.1", "localhost": "127.0.0.1"}
    found = {"eth0": ["10.1.0.1/24"], "eth1": ["10.2.0.1/24"], "docker0": ["172.17.0.1/16"]}
    monkeypatch.setattr(clusters, "address_towards", lambda host: routes.get(host, ""))
    monkeypatch.setattr(clusters, "own_addresses", lambda: found)
    monkeypatch.setattr(clusters, "interfaces", lambda loopback: {**found, "lo": ["127.0.0.1/8"]})
    monkeypatch.setattr(clusters, "is_this_host", lambda host: host == "localhost")


@pytest.mark.parametrize(
    ("hosts", "is_fixed", "addresses"),
    [
        (["localhost"], True, ["127.0.0.1"]),
        (["localhost"], False, ["10.1.0.1", "10.2.0.1", "172.17.0.1"]),  # another host may come
        (["localhost", "h2"], True, ["10.2.0.1"]),
        (["h1", "h2"], False, ["10.1.0.1", "10.2.0.1"]),
        (["unknown"], True, ["10.1.0.1", "10.2.0.1", "172.17.0.1"]),
    ],
)
def test_a_job_listens_on_the_way_to_its_hosts(networks, hosts, is_fixed, addresses):
    assert cluster(*hosts, is_fixed=is_fixed).listen_on == addresses


def test_each_host_is_given_the_address_that_it_reaches(networks):
    one = cluster("h1", "h2")
    for host in ("h1", "h2", "localhost"):
        one.find_way_to(host)
    found = [one.address_for(host) for host in ("h1", "h2", "localhost", "h9")]
    assert found == ["10.1.0.1", "10.2.0.1", "10.1.0.1", "10.1.0.1"]


def test_the_users_interfaces_count(networks):
    assert cluster("localhost", interface_names=["eth1"]).listen_on == ["10.2.0.1"]
    with pytest.raises(UsageError, match=r"no eth7 .*\n.*docker0, eth0, eth1, lo"):
        cluster("localhost", interface_names=["eth7"])


KEY = "a" * 64


@pytest.fixture
def store():
    store = WorldStore(KEY, ["127.0.0.1"])
    yield store
    store.close()


class Worker:
    """Requests of one worker, each on a connection of its own, as Horovod's are."""

    def __init__(self, store: WorldStore, key: str = KEY) -> None:
        self._address = ("127.0.0.1", store.port)
        self._signed = http_auth.SignedRequests(key)

    def __call__(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self._address, timeout=90)
        try:
            connection.request(method, path, body or None, self._signed.headers(method, path, body))
            response = connection.getresponse()
            answer = response.read()
            if response.status != 403:
                self._signed.check(response.status, response.headers, answer)
            return response.status, answer
        finally:
            connection.close()


def test_a_value_is_there_for_the_others_and_stays_after_a_worker_is_done(store):
    one, other = Worker(store), Worker(store)
    assert one("PUT", "/global/0", b"address") == (200, b"")
    assert one("DELETE", "/global/0") == (200, b"")  # the other has not read it yet
    assert other("GET", "/global/0") == (200, b"address")


def test_a_key_that_is_missing_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(clusters, "_LONG_POLL_SECONDS", 60)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(Worker(store), "GET", "/global/1")
        time.sleep(0.2)
        assert not answer.done()
        Worker(store)("PUT", "/global/1", b"x")
        assert answer.result(20) == (200, b"x")


def test_who_has_the_key_of_another_world_is_refused(store):
    for method in ("GET", "PUT", "DELETE"):
        assert Worker(store, "b" * 64)(method, "/global/0", b"x" * (method == "PUT")) == (403, b"")


def test_its_end_ends_who_waits_and_nobody_can_connect(store, monkeypatch):
    monkeypatch.setattr(clusters, "_LONG_POLL_SECONDS", 60)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(Worker(store), "GET", "/global/1") for _ in range(4)]
        time.sleep(0.2)
        since = time.monotonic()
        store.close()
        wait(answers, 30)
        assert time.monotonic() - since < 30
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=60)
