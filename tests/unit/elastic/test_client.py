"""A worker of an elastic job, led by a driver that tests script over a socket: worlds, orders, its end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import psutil
import pytest
from support.elastic_driver import KEY, ScriptedDriver, disconnect, eventually, world

from hvdtrain import errors
from hvdtrain.config import Config
from hvdtrain.elastic import messages
from hvdtrain.elastic.links import DriverHandshake, receive_line
from hvdtrain.elastic.member import membership as clients
from hvdtrain.elastic.member import orders as orders_module
from hvdtrain.elastic.member import thread as member_thread
from hvdtrain.elastic.member.membership import connect, current, interface_for
from hvdtrain.elastic.member.orders import Orders
from hvdtrain.elastic.member.thread import open_connection
from hvdtrain.elastic.watch.liveness import Told, Watching
from hvdtrain.errors import DataError, UsageError
from hvdtrain.jobs.elastic.job import join_elastic_job
from hvdtrain.jobs.failures import Signals
from hvdtrain.jobs.opening import start
from hvdtrain.jobs.opening.start import JobSpec, started
from hvdtrain.workers.world import MemberInfo, TrainingPosition, world_key

VALUES = {"config": {"epochs": 3}, "size": 100}


class Worker:
    """A worker whose calls that wait run in a thread, and what was done to its process."""

    def __init__(self, driver, *first, lease_seconds: float = 20.0, stall_timeout: float = 120.0) -> None:
        self.aborted, self.ended = [], []
        self.pool = ThreadPoolExecutor(1)
        self.environ = dict(driver.environ)
        accepted = self.pool.submit(driver.accept, *first, lease_seconds=lease_seconds)
        self.client = connect(self.environ, stall_timeout=stall_timeout, abort=self.aborted.append)
        self.client.on_end(self._end)
        accepted.result(60)

    def _end(self, error: errors.JobEnded) -> None:
        if not self.ended:
            self.ended.append(error)

    def ready(self, place=(0, 0), values=VALUES):
        return self.pool.submit(self.client.next_world, TrainingPosition(*place), valid=True, values=values)

    def enter(self, driver, **fields):
        """Bring the worker into a world."""
        entered = self.ready()
        driver.expect(messages.Ready)
        driver.say(messages.EnterWorld(world=world(**fields)))
        return entered.result(60)


@pytest.fixture
def driver():
    with ScriptedDriver() as driver:
        yield driver


@pytest.fixture
def join(driver):
    joined = []

    def start(*first, **options) -> Worker:
        joined.append(Worker(driver, *first, **options))
        return joined[-1]

    yield start
    for worker in joined:
        worker.client.orders.end(errors.JobEnded("the test is over"))
        disconnect(worker.client)
        worker.pool.shutdown(wait=False, cancel_futures=True)
    clients._current.clear()


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(member_thread, "_NOTICE_SECONDS", 0.5)
    monkeypatch.setattr(member_thread, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(clients, "_ANSWER_SECONDS", 0.5)
    for module in (member_thread, clients):
        monkeypatch.setattr(module, "REGAINED_SECONDS", 0.3)


def test_a_worker_learns_its_place_and_what_came_with_the_welcome_and_beats(driver, join):
    client = join(messages.Stop(signal=signal.SIGTERM)).client
    found = (client.worker, client.job, client.slot, client.most, client.is_joining)
    assert found == ("w7", "j1", 1, 4, True)
    assert current() is client
    driver.expect(messages.Beat)
    assert driver.expect(messages.Beat).state[0]
    assert (client.orders.stop, client.orders.why_stop) == (signal.SIGTERM, "SIGTERM came")


def test_a_worker_that_is_not_welcome(driver):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(driver.accept, messages.Refuse(problem="x"), is_welcome=False)
        with pytest.raises(errors.RefusedError):
            connect(dict(driver.environ), stall_timeout=1, abort=print)
    assert current() is None


def test_a_driver_that_does_not_know_the_key_is_not_followed(driver):
    def pretend() -> None:
        while True:
            try:
                connection, _ = driver.listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(DriverHandshake("another key").opening)
                proof = json.loads(receive_line(connection))["proof"]  # the worker's own is sent back
                connection.sendall(json.dumps({"proof": proof}).encode() + b"\n")

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(errors.EnvironmentFault, match="does not know this job's key"):
        open_connection(driver.environ, 0.2)
    driver.listener.shutdown(socket.SHUT_RDWR)


def test_a_worker_without_a_driver_says_so(driver):
    for name, value, found in (
        ("HOROVOD_RENDEZVOUS_KEY", "", "HOROVOD_RENDEZVOUS_KEY is not set"),
        ("HVDTRAIN_ELASTIC", "127.0.0.1:1", "127.0.0.1:1: Connection refused"),
    ):
        with pytest.raises(errors.EnvironmentFault, match=found):
            open_connection({**driver.environ, name: value}, 0.2)


def test_a_worker_enters_a_world(driver, join):
    worker = join()
    entered = worker.ready(place=(7, 1))
    ready = driver.expect(messages.Ready)
    found = (ready.generation, ready.place, ready.valid, ready.stall_timeout)
    assert found == (0, TrainingPosition(7, 1), True, 120.0)
    driver.say(messages.EnterWorld(world=world(3)))
    worker.client.enter(entered.result(60))
    assert worker.environ["HOROVOD_RANK"] == "0"
    assert worker.environ["HOROVOD_RENDEZVOUS_KEY"] == world_key(KEY, 3, "salt")
    assert worker.environ["HOROVOD_GLOO_IFACE"] == worker.environ["NCCL_SOCKET_IFNAME"] == "lo"
    worker.client.formed()
    assert driver.expect(messages.Formed).generation == 3
    worker.client.synced(TrainingPosition(7), "runs/one")
    synced = driver.expect(messages.Synced)
    assert (synced.place, synced.run_dir) == (TrainingPosition(7), "runs/one")
    worker.ready(place=(8, 0))
    assert driver.expect(messages.Ready).generation == 3
    driver.say(messages.Abort(generation=3, why="no route", again=True))
    assert driver.expect(messages.Ready).place == TrainingPosition(8)


@pytest.mark.parametrize(("given", "alone", "of_two"), [(None, "0.05", "1"), ("3.5", "3.5", "3.5")])
def test_horovod_does_not_wait_for_others_in_a_world_of_one(driver, join, given, alone, of_two):
    if given:
        driver.environ["HOROVOD_CYCLE_TIME"] = given
    worker = join()
    entered = worker.enter(driver)
    worker.client.enter(entered.model_copy(update={"size": 1}))
    assert worker.environ["HOROVOD_CYCLE_TIME"] == alone
    worker.client.enter(entered.model_copy(update={"size": 2}))
    assert worker.environ["HOROVOD_CYCLE_TIME"] == of_two


def test_values_arrive_with_the_first_message_however_long(driver, join):
    worker = join()
    values = {f"fingerprint {n}": "\x00" * 1000 for n in range(300)} | {"long": "x" * 10**6, "bad": "\ud800"}
    worker.ready(values=values)
    found = driver.expect(messages.Ready).values
    assert found.keys() == values.keys()
    assert "SHA-256" in found["long"]


def test_abort_reaches_a_training_thread_in_a_collective(driver, join, monkeypatch):
    worker = join()
    worker.enter(driver, generation=2)
    driver.say(messages.Abort(generation=1, why="too late"))
    assert worker.client.explain() is None
    monkeypatch.setattr(orders_module, "_EXPLAINED_SECONDS", 60)
    driver.say(messages.Abort(generation=2, why="rank 1 on h2: killed"))
    assert worker.client.explain().problem == "rank 1 on h2: killed"
    assert eventually(lambda: len(worker.aborted) > 2)  # a start of Horovod forgets an abort before it
    assert worker.client.orders.wants_change
    with pytest.raises(errors.PeerLostError, match="rank 1 on h2"):
        worker.client.enter(world(2))
    worker.ready()
    driver.expect(messages.Ready)
    count = len(worker.aborted)
    time.sleep(0.3)
    assert len(worker.aborted) == count
    assert not worker.client.orders.wants_change


def test_a_world_that_is_given_up_before_it_is_taken_is_dropped():
    orders = Orders(abort=pytest.fail)
    orders.begin_waiting()
    assert not orders.take(messages.EnterWorld(world=world(1)))
    assert orders.take(messages.Abort(generation=1, why="x"))  # it says again that it is ready
    assert not orders.take(messages.EnterWorld(world=world(1)))
    orders.take(messages.EnterWorld(world=world(2)))
    assert orders.wait().generation == 2
    for generation, wanted in ((1, False), (2, True)):  # a change is for one world
        orders.take(messages.ChangeWorld(generation=generation, why="w8 joins"))
        assert orders.wants_change == wanted
    orders.begin_waiting()
    assert not orders.wants_change


def test_a_worker_leaves_when_the_driver_agrees(driver, join):
    worker = join()
    worker.enter(driver)
    worker.client.leave("SIGTERM came")
    worker.client.leave("SIGUSR2 came")
    assert driver.expect(messages.Leaving).why == "SIGTERM came"
    driver.say(messages.ChangeWorld(generation=1, why="rank 0 leaves"))
    assert eventually(lambda: worker.client.orders.wants_change)
    assert worker.aborted == []
    entered = worker.ready()
    driver.expect(messages.Ready)
    driver.say(messages.Leave(why="it asked for it"))
    with pytest.raises(errors.Removed):
        entered.result(60)
    worker.client.left()
    driver.expect(messages.LeftWorld)
    driver.expect(messages.Beat)  # a driver kills a worker that it cannot hear, and its end may take a moment
    assert worker.ended == []


def test_a_worker_that_differs_is_refused(driver, join):
    entered = (worker := join()).ready()
    driver.say(messages.Refuse(problem="size: 100 and 101", remedy="the same data"))
    with pytest.raises(errors.RefusedError, match="100 and 101"):
        entered.result(60)
    worker.client.failed(errors.RefusedError("x"))
    assert not driver.hears(messages.Failed, 0.3)


@pytest.mark.parametrize("waits", [True, False])
def test_the_end_reaches_a_worker_that_waits_and_one_that_hangs(driver, join, waits):
    worker = join()
    entered = worker.ready() if waits else worker.enter(driver)
    driver.say(messages.End(problem="the task failed", remedy="mend it", exit_code=4, speaks=not waits))
    if waits:
        error = entered.exception(60)
    else:
        assert eventually(lambda: bool(worker.ended))
        error = worker.ended[0]
        assert worker.aborted[0] == "the task failed"
    assert isinstance(error, errors.JobEnded)
    assert (error.problem, error.exit_code, error.speaks) == ("the task failed", 4, not waits)


def test_the_end_of_the_driver_is_the_end_of_the_job(driver, join):
    worker = join()
    worker.enter(driver)
    driver.close()
    assert eventually(lambda: bool(worker.ended))
    assert (worker.ended[0].exit_code, worker.ended[0].speaks) == (3, True)
    assert "launcher" in worker.ended[0].problem
    assert worker.aborted
    assert worker.client.lost_lease == ""  # a save that is under way may end


def test_an_error_is_told_once(driver, join, monkeypatch):
    monkeypatch.setattr(clients, "_ANSWER_SECONDS", 60)  # as a busy machine needs
    worker, error = join(), errors.TaskError("no loss")
    failed = worker.pool.submit(worker.client.failed, error)
    message = driver.expect(messages.Failed)
    assert (message.blame, message.problem, message.exit_code) == ("code", "no loss", 2)
    driver.say(messages.End(problem=error.problem, exit_code=2, speaks=True))
    failed.result(60)
    assert worker.client.orders.ended.speaks
    worker.client.failed(error)
    assert not driver.hears(messages.Failed, 0.3)


def test_a_stopped_process_is_killed_if_it_is_the_one_that_is_meant(driver, join):
    join()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as other:
        os.kill(other.pid, signal.SIGSTOP)
        started = psutil.Process(other.pid).create_time()
        driver.say(messages.KillProcess(pid=other.pid, process_seconds=started - 100))
        driver.say(messages.KillProcess(pid=os.getpid(), process_seconds=psutil.Process().create_time()))
        time.sleep(0.3)
        assert other.poll() is None
        driver.say(messages.KillProcess(pid=other.pid, process_seconds=started))
        assert other.wait(60) == -signal.SIGKILL


def test_a_flood_of_what_is_no_message_does_nothing(driver, join):
    worker = join()
    driver.connection.settimeout(60)
    for part in (b"x" * (1 << 20), b"\n{}\n[]\n" + b"[" * 5000 + b"\n", b"End {}\n\xff\xfe\n"):
        driver.connection.sendall(part)
    assert worker.enter(driver, generation=4).generation == 4


def test_a_driver_that_does_not_answer_costs_the_lease(driver, join):
    worker = join(lease_seconds=60, stall_timeout=1.0)
    worker.enter(driver)
    driver.say(messages.DriverBeat())
    assert worker.client.lost_lease == ""
    worker.client._lease.seconds = 0.5
    assert eventually(lambda: worker.client._lease.is_lost)
    assert "has not answered" in worker.client.lost_lease
    assert eventually(lambda: bool(worker.ended))
    assert worker.aborted
    assert worker.ended[0].exit_code == 3


@pytest.mark.parametrize(("is_member_thread", "seconds"), [(False, 5.0), (True, 0.5)])
def test_nobody_waits_for_ever_for_a_lease(driver, join, monkeypatch, is_member_thread, seconds):
    """The thread that would hear the driver has ended, or is the one that asks."""
    worker = join()
    monkeypatch.setattr(member_thread.Lease, "may_be_regained", True)
    monkeypatch.setattr(member_thread.Lease, "is_lost", True)
    asked = threading.Thread(target=lambda: worker.client.lost_lease, daemon=True)
    if is_member_thread:
        monkeypatch.setattr(worker.client._thread, "_thread", asked)
    asked.start()
    asked.join(seconds)
    assert not asked.is_alive()


FROZEN = """
import os, sys, time
from hvdtrain.elastic.member.membership import connect
client = connect(os.environ, stall_timeout=60.0, abort=lambda why: None)
print("joined", flush=True)
while True:
    if not client.lost_lease:
        open(sys.argv[1], "a").write("x")
    time.sleep(0.02)
"""


def test_a_process_that_was_stopped_and_excluded_ends_and_writes_nothing(driver, tmp_path):
    file = tmp_path / "log"
    command = [sys.executable, "-c", FROZEN, str(file)]
    environ = {**os.environ, **driver.environ}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as frozen:
        driver.accept(lease_seconds=1.0)
        driver.say(messages.DriverBeat())
        assert frozen.stdout.readline() == "joined\n"
        # which renews the lease
        assert eventually(lambda: driver.say(messages.DriverBeat()) or file.exists())
        os.kill(frozen.pid, signal.SIGSTOP)
        time.sleep(0.2)
        written = file.stat().st_size
        for _ in range(3):  # what it finds when it wakes says nothing of now
            driver.say(messages.DriverBeat())
            time.sleep(1.2)  # in all, longer than what counts as a pause
        driver.close()
        os.kill(frozen.pid, signal.SIGCONT)
        assert frozen.wait(60) == 3
        assert file.stat().st_size - written <= 1  # one that had begun


ENDS = """
import os, sys
from hvdtrain.elastic.member.membership import connect
from hvdtrain.errors import *
from hvdtrain.jobs.failures import end_worker
if sys.argv[2] == "joined":
    connect(os.environ, stall_timeout=60.0, abort=lambda why: None)
end_worker(eval(sys.argv[1]), debug=False)
"""


def _end(
    driver, error: str, *answer: messages.End, first: tuple = (), joined: str = "joined"
) -> tuple[int, str]:
    """Let a worker end with an error; return its exit code and what it said."""
    words = ["-c", ENDS, error, joined] if error else ["-m", "hvdtrain", "--epochs", "many"]
    environ = {**os.environ, **driver.environ}
    with (
        subprocess.Popen([sys.executable, *words], env=environ, stderr=subprocess.PIPE, text=True) as worker,
        ThreadPoolExecutor(1) as pool,
    ):
        said = pool.submit(worker.communicate, timeout=300)
        driver.accept(*first, is_welcome=not first)
        if not first:
            driver.expect(messages.Failed)
            driver.say(*answer)
        _, text = said.result()
    return worker.returncode, text


def test_a_worker_that_nobody_else_speaks_for_says_it(driver):
    code, said = _end(driver, "TaskError('no loss', 'Add one.')")
    assert code == 2
    assert "hvdtrain: worker w7 on " in said
    assert said.endswith("no loss\n  Add one.\n")


def test_a_worker_that_failed_because_the_job_ended_ends_as_the_job(driver):
    assert _end(driver, "EnvironmentFault('lost')", messages.End(problem="no loss", exit_code=2)) == (2, "")


def test_an_error_before_a_worker_joined_is_said_by_it_unless_the_job_has_ended(driver):
    code, said = _end(driver, "ConfigError('epochs: -1')", joined="")
    assert (code, "epochs: -1" in said) == (2, True)
    ended = (messages.End(problem="", exit_code=2),)
    assert _end(driver, "ConfigError('epochs: -1')", first=ended, joined="") == (2, "")


def test_all_workers_have_an_error_of_the_command_line_and_one_says_it(driver):
    assert _end(driver, "", messages.End(problem="another worker said it", exit_code=2)) == (2, "")


CONFIG = Config(framework="torch", epochs=1)
JOB = JobSpec(CONFIG, None, "build", {})


def test_a_worker_joins_the_job_that_started_it(driver, monkeypatch):
    signals = Signals()
    for name, value in driver.environ.items():
        monkeypatch.setenv(name, value)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(driver.accept)
        membership = join_elastic_job(CONFIG, signals, Watching())
        accepted.result(10)
        assert signals.membership is membership
        assert membership.worker == "w7"
        disconnect(membership)
    clients._current.clear()


@pytest.fixture
def backend(monkeypatch):
    backend = Mock(workers=None)
    monkeypatch.setattr(start, "load_backend", lambda *_: backend)
    monkeypatch.setattr(start, "watch_workers", pytest.fail)
    return backend


def _raise_in(member, error, watching=None):
    with started(JOB, Signals(), watching, member) as found:
        assert watching is None or watching.explain() == member.explain()
        assert (found.close.call_count, member.failed.call_count) == (0, 0)
        raise error


def test_the_driver_watches_the_workers_and_is_told_of_an_error_before_horovod_is_stopped(backend):
    member, error = Mock(explain=lambda: Told("rank 1 on h2: killed (SIGKILL)")), DataError("no data")
    with pytest.raises(DataError):
        _raise_in(member, error, Watching())
    member.failed.assert_called_once_with(error)
    backend.close.assert_called_once_with()


def test_a_job_that_cannot_be_elastic_is_refused(backend, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_ELASTIC", "127.0.0.1:4000")
    with pytest.raises(UsageError, match="fixed number of workers"):
        _raise_in(None, AssertionError("it began"))


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ({"10.0.0.9": "10.0.0.1"}, "eth0"),
        ({"10.0.0.9": "127.0.0.1", "h2": "10.1.0.1"}, "eth1"),  # the rendezvous is on this host
        ({"10.0.0.9": "127.0.0.1", "h2": ""}, "eth0"),
    ],
)
def test_several_hosts_connect_over_the_interface_between_them(monkeypatch, routes, expected):
    found = {"lo": ["127.0.0.1/8"], "eth0": ["10.0.0.1/24"], "eth1": ["10.1.0.1/24"]}
    monkeypatch.setattr(clients, "interfaces", lambda loopback: found)
    monkeypatch.setattr(clients, "own_addresses", lambda: {"eth0": [], "eth1": []})
    monkeypatch.setattr(clients, "address_towards", routes.__getitem__)
    members = tuple(MemberInfo(worker=f"w{n}", rank=n, host=f"h{n + 1}", pid=1) for n in range(2))
    one = world(one_host=False, store=("10.0.0.9", 1), members=members)
    assert interface_for(one) == expected
