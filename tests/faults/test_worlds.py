"""Processes that live through many worlds: whoever is lost, the others go on with right sums."""

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from support import world_member
from support.elastic_driver import world
from support.jobs import environment

from hvdtrain.backends import torchrun
from hvdtrain.workers.world import world_key

START_SECONDS = 300
ANSWER_SECONDS = 90  # of Gloo's 120: nothing here may end by its timeout
NOTICED_SECONDS = 20  # some 0.05 on an idle machine
LARGE = {"length": 4_000_000, "times": 500}  # many seconds


class Member:
    """One worker process."""

    def __init__(self) -> None:
        variables = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "OMP_NUM_THREADS": "1"}
        variables |= {"HOROVOD_GLOO_TIMEOUT_SECONDS": "120", "HOROVOD_GLOO_IFACE": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, world_member.__file__],
            env=environment(**variables, HOROVOD_LOG_LEVEL="fatal"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.Queue[dict] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"ended": True})

    def order(self, do: str, **values: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self.process.stdin.flush()

    def answer(self, seconds: float = ANSWER_SECONDS) -> dict:
        return self._answers.get(timeout=seconds)


class Worlds:
    """Makes worlds of members as the driver of an elastic job does: each has its own store and key."""

    def __init__(self) -> None:
        self._generation = 0
        self._server = None

    def order(self, members: Sequence[Member], port: int = 0) -> None:
        """Order members into the next world, by rank; its store is new unless another's port is given."""
        self.close()
        self._generation += 1
        salt = f"salt {self._generation}"
        self._server = torchrun._start_server(
            "127.0.0.1", world_key(world_member.KEY, self._generation, salt)
        )
        self._server.init(get_host_assignments([HostInfo("localhost", len(members))], len(members)))
        for rank, member in enumerate(members):
            store = ("127.0.0.1", port or self._server.server_address[1])
            place = {"host": "localhost", "store": store, "salt": salt, "members": ()}
            entered = world(self._generation, rank, len(members), **place)
            member.order("enter", world=entered.model_dump())

    def form(self, *members: Member) -> None:
        """Order members into the next world, and check that they are in it and sum right."""
        self.order(members)
        for rank, member in enumerate(members):
            assert member.answer() == {"rank": rank, "ranks": list(range(len(members)))}
        for rank, member in enumerate(members):
            member.order("sum", length=1000, times=3, value=float(rank + self._generation))
        expected = float(sum(rank + self._generation for rank in range(len(members))))
        assert [member.answer() for member in members] == [{"sum": expected}] * len(members)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def leave(*members: Member, broken: bool = False) -> list[dict]:
    for member in members:
        member.order("leave", broken=broken)
    return [member.answer() for member in members]


def assert_lost(members: Sequence[Member], since: float) -> None:
    """Check that the members were told of a lost worker soon, and let them leave."""
    for member in members:
        assert member.answer(NOTICED_SECONDS)["error"] == "PeerLostError"
    assert time.monotonic() - since < NOTICED_SECONDS
    leave(*members, broken=True)


@pytest.fixture
def members() -> Iterator[list[Member]]:
    processes = [Member() for _ in range(3)]
    try:
        for member in processes:
            assert member.answer(START_SECONDS) == {"up": True}
        yield processes
    finally:
        for member in processes:
            member.process.kill()
            member.process.wait()
            member.process.stdin.close()


def come_and_go(worlds: Worlds, a: Member, b: Member, c: Member) -> dict:
    """Return what the last one to leave had open."""
    for several in ((a,), (a, b), (b, c, a), (b,), (a, c), (a, b, c)):
        worlds.form(*several)
        left = leave(*several)[-1]
    return left


def differ(worlds: Worlds, a: Member, b: Member) -> None:
    """Operations that differ are an error of the task on all, and the world goes on."""
    worlds.form(a, b)
    for member, length in ((a, 10), (b, 11)):
        member.order("sum", length=length, times=1, value=1.0)
    assert [member.answer()["error"] for member in (a, b)] == ["TrainingError"] * 2
    for member in (a, b):
        member.order("sum", length=12, times=1, value=2.0)
    assert [member.answer() for member in (a, b)] == [{"sum": 4.0}] * 2
    leave(a, b)


def stop_in_a_sum(worlds: Worlds, a: Member, b: Member, c: Member) -> None:
    """The others learn it only by being told, and who is stopped wakes up in no world."""
    worlds.form(a, b, c)
    for member in (a, b, c):
        member.order("sum", value=1.0, **LARGE)
    time.sleep(0.5)
    c.process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    for member in (a, b):
        member.order("abort")
    assert_lost((a, b), time.monotonic())
    worlds.form(b, a)
    c.process.send_signal(signal.SIGCONT)
    assert_lost((c,), time.monotonic())
    leave(a, b)


def stop_in_init(worlds: Worlds, a: Member, b: Member, c: Member, *, before: bool) -> None:
    """One is stopped before it begins, or while it connects. The others, in hvd.init(), are told."""
    if before:
        c.process.send_signal(signal.SIGSTOP)
    worlds.order((a, b, c))
    time.sleep(0.03)
    c.process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    worlds.close()
    for member in (a, b):
        member.order("abort")
    told = [member.answer(NOTICED_SECONDS) for member in (a, b)]
    assert not before or [found.get("error") for found in told] == ["PeerLostError"] * 2
    leave(a, b, broken=True)
    c.process.send_signal(signal.SIGCONT)
    c.answer()
    leave(c, broken=True)


def wait_for_a_silent_store(worlds: Worlds, a: Member) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        worlds.order((a,), port=silent.getsockname()[1])
        time.sleep(0.3)
        a.order("abort")
        assert_lost((a,), time.monotonic())


def kill_in_a_sum(worlds: Worlds, a: Member, b: Member, c: Member) -> None:
    """The others learn it from the connections."""
    worlds.form(c, b, a)
    for member in (a, b, c):
        member.order("sum", value=1.0, **LARGE)
    time.sleep(0.5)
    c.process.kill()
    assert_lost((a, b), time.monotonic())
    worlds.form(a, b)
    leave(a, b)


def test_workers_live_through_worlds_in_which_others_come_and_go(members):
    a, b, c = members
    worlds = Worlds()
    try:
        first = come_and_go(worlds, a, b, c)
        differ(worlds, a, b)
        stop_in_a_sum(worlds, a, b, c)
        stop_in_init(worlds, a, b, c, before=True)
        stop_in_init(worlds, a, b, c, before=False)
        wait_for_a_silent_store(worlds, a)
        last = come_and_go(worlds, a, b, c)
        assert last["files"] <= first["files"]
        assert last["threads"] <= first["threads"] + 2
        kill_in_a_sum(worlds, a, b, c)
    finally:
        worlds.close()
