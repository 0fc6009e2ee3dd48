"""The driver's loop with fake workers on sockets: who is let in, who disturbs nobody, how all are ended."""

import contextlib
import json
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest

from hvdtrain.elastic import links, messages
from hvdtrain.elastic.driver import driver
from hvdtrain.elastic.driver.driver import Driver
from hvdtrain.elastic.driver.records import Limits
from hvdtrain.elastic.links import prove_to_driver
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.workers.world import TrainingPosition

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class FakeProcess(subprocess.Popen):
    """A process of this machine that stands for one on some host."""

    signal = subprocess.Popen.send_signal


class FakeCluster:
    """A host that is this machine, with one slot, and the command of a worker."""

    def __init__(self, words) -> None:
        self._words, self.addresses, self.listen_on = words, (), ["127.0.0.1"]
        self.processes: dict[str, FakeProcess] = {}
        self.said: list[str] = []
        self.say = self.said.append

    def hosts(self):
        return [HostSlots("h1", 1)]

    def start(self, worker, slot, on_exit) -> FakeProcess:
        process = self.processes[worker] = FakeProcess(self._words)
        threading.Thread(target=lambda: on_exit(process.wait()), daemon=True).start()
        return process

    def kill_far(self, host, pid, process_seconds) -> None:
        pass

    def open_store(self, key):
        """Return a rendezvous at which nobody meets."""
        return Mock(port=1)

    def address_for(self, host) -> str:
        return "127.0.0.1"


class DriverJob:
    """A job of one worker's process, whose driver runs in a thread and writes its state into a folder."""

    def __init__(self, folder, words=SLEEP) -> None:
        self.key, self.cluster, self._state = secrets.token_hex(16), FakeCluster(words), folder / "state.json"
        environ = {driver.STATE_VARIABLE: str(self._state)}
        self.driver = Driver(Limits(1, 1, 1), self.cluster, self.key, environ=environ)
        self.outcome = None
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> "DriverJob":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(2):
            if self.thread.is_alive():
                self.driver.signal(signal.SIGTERM)
        self.thread.join(120)
        for process in self.cluster.processes.values():
            process.poll() is None and process.kill()
        assert not self.thread.is_alive()

    def _run(self) -> None:
        self.outcome = self.driver.run()

    def ended(self):
        """Wait for the end, and return it; no process is left."""
        self.thread.join(120)
        assert not self.thread.is_alive(), self.cluster.said
        left = [name for name, one in self.cluster.processes.items() if one.poll() is None]
        assert not left, f"processes left: {left}"
        return self.outcome

    def members(self) -> list[dict]:
        """Return what the driver says of its workers."""
        with contextlib.suppress(OSError):
            return json.loads(self._state.read_text())["members"]
        return []

    def until(self, is_so) -> None:
        """Wait until something holds."""
        until = time.monotonic() + 60
        while not is_so(self):
            assert time.monotonic() < until, (self.members(), self.cluster.said)
            assert self.thread.is_alive(), (self.outcome, self.cluster.said)
            time.sleep(0.02)


class FakeWorker:
    """A worker that is this thread."""

    def __init__(self, job: DriverJob, name: str = "w1") -> None:
        self.connection = socket.create_connection(job.cluster.addresses[0], 60)
        prove_to_driver(self.connection, job.key, name)
        self.connection.settimeout(60)
        self._file = self.connection.makefile("rb")

    def hello(self):
        self.send(messages.Hello(host="h1", machine="m", pid=0, process_seconds=1.0))
        return self.receive()

    def is_welcome(self) -> bool:
        return isinstance(self.hello(), messages.Welcome)

    def send(self, message) -> None:
        self.connection.sendall(messages.encode(message))

    def receive(self, kind=object):
        while True:
            line = self._file.readline()
            if not line:
                return None
            message = messages.from_driver(line)
            if isinstance(message, kind):
                return message


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job whose one worker's process sleeps; the test speaks for it."""
    monkeypatch.setattr(driver, "BEAT_SECONDS", 0.1)
    with DriverJob(tmp_path) as job:
        job.until(lambda job: job.cluster.processes)
        yield job


def test_a_worker_is_welcome_once(job):
    first = FakeWorker(job)
    welcome = first.hello()
    assert (welcome.worker, welcome.slot, welcome.most) == ("w1", 0, 1)
    assert isinstance(FakeWorker(job).hello(), messages.Refuse)  # its name is taken
    assert isinstance(FakeWorker(job, "w99").hello(), messages.Refuse)
    assert isinstance(FakeWorker(job, "").hello(), messages.Refuse)
    first.send(
        messages.Ready(generation=0, place=TrainingPosition(), valid=False, digest="d", stall_timeout=5)
    )
    job.until(lambda job: job.members()[0]["stage"] in ("entering", "ready"))


def test_the_driver_listens_where_its_cluster_is_reached_and_nowhere_else():
    cluster = FakeCluster(SLEEP)
    cluster.listen_on = ["127.0.0.2", "127.0.0.3"]
    listening = Driver(Limits(1, 1, 1), cluster, "key")
    assert [address for address, _ in cluster.addresses] == ["127.0.0.2", "127.0.0.3"]
    listening._end_all()


def test_strangers_hold_up_nobody_and_their_number_is_bounded(job, monkeypatch):
    monkeypatch.setattr(links, "_MAX_STRANGERS", 20)
    monkeypatch.setattr(links, "HANDSHAKE_SECONDS", 120)
    address = job.cluster.addresses[0]
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(60)]
        began = time.monotonic()
        assert FakeWorker(job).is_welcome()
        assert time.monotonic() - began < 60
        strangers[0].settimeout(60)
        while strangers[0].recv(4096):
            pass  # the oldest were closed


def test_what_is_no_handshake_ends_the_connection(job):
    wrong = (
        b'{"worker": 1, "nonce": "", "proof": ""}\n',
        b'{"worker": "w1", "nonce": "", "proof": "\\ud800"}\n',
    )
    for sent in (b"x" * 100_000, b"Hello {}\n", *wrong, b"\xff\n", b"[" * 1000 + b"\n"):
        with socket.create_connection(job.cluster.addresses[0], 5) as stranger, contextlib.suppress(OSError):
            stranger.sendall(sent)
            while stranger.recv(4096):
                pass
    assert FakeWorker(job).is_welcome()


def test_a_line_without_end_and_a_flood_end_or_disturb_nobody(job):
    flooder = FakeWorker(job)
    assert flooder.is_welcome()
    with contextlib.suppress(OSError):
        for _ in range(2000):
            flooder.send(messages.Beat(state=["training", 1, 1, 4, False, 0.0, ""]))
        flooder.connection.sendall(b"x" * (1 << 26))
        while flooder.receive():
            pass
    job.until(lambda job: len(job.cluster.processes) == 2)  # it was lost, and another one started


def test_a_worker_that_reads_nothing_disturbs_nobody_and_one_that_still_saves_at_the_end_hears_the_driver(
    job,
):
    worker = FakeWorker(job)
    assert worker.is_welcome()
    time.sleep(0.5)  # beats are sent, and not read
    assert [one["stage"] for one in job.members()] == ["building"]
    worker.send(messages.Failed(blame="code", problem="the loss is NaN", exit_code=4))
    assert worker.receive(messages.End)
    for _ in range(3):
        assert worker.receive(messages.DriverBeat)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_happens_all_workers_are_ended(job):
    process = job.cluster.processes["w1"]
    job.cluster.hosts = lambda: 1 / 0
    job.thread.join(60)
    assert not job.thread.is_alive()
    assert process.wait(60) == -signal.SIGKILL


def test_a_worker_that_cannot_be_started_is_reported(tmp_path):
    with DriverJob(tmp_path, ["/no/such/command"]) as job:
        assert job.ended().exit_code == 3
    assert "cannot start a worker on h1, slot 0" in job.cluster.said[0]


def test_workers_that_do_not_end_are_killed_at_the_end(tmp_path):
    with DriverJob(tmp_path) as job:
        job.until(lambda job: job.cluster.processes)
        job.driver.signal(signal.SIGTERM)
        job.driver.signal(signal.SIGTERM)
        assert job.ended().exit_code == 143
