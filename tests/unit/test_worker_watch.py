"""The watch of workers: by which rules who counts as stopped, stalled or gone, and who is told of what."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest
from support.elastic_driver import eventually

from hvdtrain.elastic.watch import worker_watch
from hvdtrain.elastic.watch.liveness import (
    HostLost,
    Left,
    Liveness,
    Member,
    Silent,
    Stalled,
    WatchLimits,
    WorkerState,
    blame,
    read_state,
    silence_seconds,
)
from hvdtrain.elastic.watch.worker_watch import WorkerWatch
from hvdtrain.workers.activity import READING_DATA, TRAINING, Activity, ActivityMark

MEMBERS = [Member(0, "h1", "m"), Member(1, "h1", "m"), Member(2, "h2", "m"), Member(3, "h3"), Member(4, "h3")]


class Alarm:
    """Records the calls of a watch."""

    def __init__(self) -> None:
        self.events: list = []
        self.rung = threading.Event()

    def __call__(self, event, stacks: str) -> None:
        self.events.append(event)
        self.rung.set()


class TimesOut(socket.socket):
    """A connection that the kernel has ended because the other side is silent."""

    def recv(self, *_) -> bytes:
        raise TimeoutError(110, "Connection timed out")


@pytest.fixture
def watching(monkeypatch):
    monkeypatch.setattr(worker_watch.liveness, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(worker_watch, "_SPEAKS_ALONE_SECONDS", 0.2)
    monkeypatch.setattr(worker_watch, "_KILL_AFTER_SECONDS", 0.1)
    watches = []

    def start(connections: dict, rank: int = 0, limits: WatchLimits | None = None, members=MEMBERS) -> Alarm:
        alarm, mark = Alarm(), ActivityMark()
        mark.enter(TRAINING, 12)
        options = {"limits": limits or WatchLimits(0), "on_event": alarm, "mark": mark}
        alarm.watch = WorkerWatch(members[rank], members, connections, **options)
        watches.append(alarm.watch)
        return alarm

    yield start
    for one in watches:
        one.close()


def messages(connection, seconds: float = 0.3) -> list[dict]:
    connection.settimeout(seconds)
    data = b""
    with suppress(TimeoutError):
        while part := connection.recv(4096):
            data += part
    return [json.loads(line) for line in data.splitlines()]


def heard_by(alarm: Alarm) -> list[str]:
    """Return what the others are doing, as far as a watch has heard it."""
    states = [heard.state for heard in list(alarm.watch._liveness._heard.values())]
    return [state.name for state in states if state is not None]


def test_both_sides_tell_what_they_do(watching):
    here, there = socket.socketpair()
    first, second = watching({here: MEMBERS[1]}, 0), watching({there: MEMBERS[0]}, 1)
    for alarm in (first, second):
        assert eventually(lambda alarm=alarm: heard_by(alarm) == ["in training step 12"])
    second.watch.close()
    assert not first.rung.wait(0.5), "a goodbye is no event"


def test_a_silent_host_is_named_with_its_ranks_and_the_others_are_told(watching):
    (here, there), (lost, _) = socket.socketpair(), socket.socketpair()
    silent = TimesOut(fileno=lost.detach())
    alarm = watching({silent: MEMBERS[3], here: MEMBERS[2]}, 0, WatchLimits(0, 20))
    assert alarm.rung.wait(60)
    (event,) = alarm.events
    assert isinstance(event, HostLost)
    assert event.problem == "host h3 (ranks 3, 4) is gone: it has not answered for 20 s"
    assert {"end": event.problem, "stopped": []} in messages(there)
    there.close()


def test_a_process_that_ends_without_a_goodbye_is_named_and_the_others_are_told(watching):
    here, there = socket.socketpair()
    other, third = socket.socketpair()
    alarm = watching({here: MEMBERS[1], other: MEMBERS[2]})
    there.close()
    assert alarm.rung.wait(60)
    (event,) = alarm.events
    assert isinstance(event, Left)
    assert event.ranks == (1,)
    told = [message for message in messages(third) if "state" not in message]
    assert told == [{"gone": event.problem}, {"end": event.problem, "stopped": []}]
    third.close()


def test_a_worker_that_failed_and_said_so_is_no_event(watching):
    here, there = socket.socketpair()
    alarm = watching({here: MEMBERS[1]})
    there.sendall(b'{"goodbye": true}\n')
    there.close()
    assert not alarm.rung.wait(0.5)
    assert alarm.watch.explain() is None


@pytest.mark.parametrize("is_same", [True, False], ids=["the-worker", "another-process-of-its-number"])
def test_a_stopped_process_of_this_host_is_killed_so_that_it_cannot_wake_up(watching, is_same):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGSTOP)
    begun = psutil.Process(process.pid).create_time() + (0 if is_same else 100)
    members = [MEMBERS[0], Member(1, "h1", "m", process.pid, begun)]
    here, there = socket.socketpair()
    alarm = watching({here: members[1]}, 0, WatchLimits(0.3), members)
    assert alarm.rung.wait(60)
    assert isinstance(alarm.events[0], Silent)
    if is_same:
        assert process.wait(60) == -signal.SIGKILL
    else:
        time.sleep(0.3)
        assert process.poll() is None
        process.kill()
        process.wait()
    there.close()


def test_rank_1_says_that_rank_0_does_not_answer(watching):
    here, there = socket.socketpair()
    alarm = watching({here: MEMBERS[0]}, 1, WatchLimits(0.3))
    assert alarm.rung.wait(60)
    assert alarm.events[0].ranks == (0,)
    assert any("end" in message for message in messages(there)), "rank 0 must not wake up into the job"
    there.close()


def test_the_user_sets_how_long_a_host_may_be_silent():
    found = [silence_seconds({"HVDTRAIN_HOST_SILENCE_SECONDS": one}) for one in ("", "0", "45", "soon")]
    assert [silence_seconds({}), *found] == [20, 20, 0, 45, 20]


ROOT, ONE, TWO = Member(0, "h1"), Member(1, "h2"), Member(2, "h2")


def doing(name=TRAINING, step=12, age=0.0, is_long=False, user_code=""):
    activity = Activity(name, 0.0, is_long, 0, step)
    return WorkerState(str(activity), 0, step, activity.place, is_long, age, user_code)


def liveness(others=(ONE, TWO), timeout=120.0):
    return Liveness(ROOT, list(others), timeout, 0.0)


def test_a_process_that_does_not_answer_is_named_with_what_it_did_last():
    rules = liveness()
    for second in range(1, 121):
        rules.beat(2, doing(age=second), float(second))
        if second == 1:
            rules.beat(1, doing(step=1204), 1.0)
    assert rules.judge(doing(age=120), 120.0) is None
    event = rules.judge(doing(age=121), 121.0)
    assert isinstance(event, Silent)
    assert event.ranks == (1,)
    assert event.problem == (
        "rank 1 on h2 has not answered for 120 s: stopped or starved; last it was in training step 1,204"
    )


def judged(own, one, two, at=121.0, timeout=120.0):
    rules = liveness(timeout=timeout)
    rules.beat(1, one, at)
    rules.beat(2, two, at)
    return rules.judge(own, at)


def test_the_worker_that_others_wait_for_is_named_with_the_place_in_the_users_code():
    reading = doing(READING_DATA, 12, age=130, user_code="data.py, line 7, in __getitem__")
    event = judged(doing(age=130), reading, doing(age=130))
    assert isinstance(event, Stalled)
    assert event.ranks == (1,)
    assert event.problem.endswith("reading data for training step 12 (data.py, line 7, in __getitem__)")


def test_workers_that_cannot_be_told_apart_are_all_named_and_nobody_as_long_as_one_makes_progress():
    assert judged(doing(age=1), doing(READING_DATA, age=500), doing(age=500)) is None
    event = judged(doing(age=130), doing(age=125), doing(age=140))
    assert event.ranks == ()
    assert event.problem.startswith("no worker has made progress for 125 s: rank 0 on h1 is in training step")


@pytest.mark.parametrize(("timeout", "age", "ends"), [(120, 1201, True), (5, 599, False)])
def test_long_work_that_others_wait_for_has_ten_times_as_long_or_ten_minutes(timeout, age, ends):
    saving = doing("saving after step", 11, age, is_long=True)
    event = judged(doing(age=age), saving, doing(age=age), timeout=timeout)
    assert (event is not None) == ends


def test_long_work_of_a_worker_that_itself_waits_changes_nothing():
    evaluating = doing("evaluating after step", 12, 130, is_long=True)
    event = judged(evaluating, doing(READING_DATA, 12, age=130), evaluating)
    assert event is not None
    assert event.ranks == (1,)


def test_a_process_that_was_stopped_itself_begins_anew_and_who_said_goodbye_is_neither_silent_nor_gone():
    rules = liveness([ONE])
    rules.forgive(500.0)
    assert rules.judge(doing(), 619.0) is None
    assert isinstance(rules.judge(doing(), 620.0), Silent)
    rules.drop(1)
    assert rules.judge(doing(age=1e6), 1e6) is None
    assert rules.left(1) is None


def test_who_is_behind_is_waited_for():
    assert blame({0: doing(TRAINING, 13), 1: doing(READING_DATA, 13)}) == [1]
    assert blame({0: doing(TRAINING, 13), 1: doing(TRAINING, 12)}) == [1]
    assert blame({0: doing("saving after step", 12), 1: doing(READING_DATA, 13)}) == [0]
    assert blame({0: doing("opening the data", 0), 1: doing("building the model", 0)}) == []
    user = doing("opening the data", 0, user_code="task.py, line 3, in train_data")
    assert blame({0: doing("comparing the data", 0), 1: user}) == [1]
    assert blame({0: user, 1: user}) == []


def test_what_a_worker_tells_of_itself_survives_the_way_and_nonsense_does_not():
    state = doing(user_code="x.py, line 1, in f")
    assert read_state(list(state)) == state
    for nonsense in (None, [], ["x"], [1, *list(state)[1:]], {"name": "x"}):
        assert read_state(nonsense) is None
