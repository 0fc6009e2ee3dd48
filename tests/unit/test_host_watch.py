"""The watch of hosts: who is notified of a lost host, and what is not a lost host."""

import socket
import threading

import pytest

from hvdtrain.errors import PeerLostError
from hvdtrain.jobs.host_connections import HostRanks
from hvdtrain.jobs.host_watch import HostWatch, silence_seconds, watch_hosts

H1, H2, H3 = HostRanks("h1", 0, (0, 1)), HostRanks("h2", 2, (2,)), HostRanks("h3", 3, (3, 4))


class Alarm:
    """Records the calls of a watch."""

    def __init__(self) -> None:
        self.errors: list[PeerLostError] = []
        self.rung = threading.Event()

    def __call__(self, error: PeerLostError) -> None:
        self.errors.append(error)
        self.rung.set()


class TimesOut:
    """A connection that the kernel has ended because the other side is silent."""

    def __init__(self) -> None:
        self._socket, self._peer = socket.socketpair()
        self._peer.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def recv(self, size: int) -> bytes:
        raise TimeoutError(110, "Connection timed out")

    def send(self, data: bytes, flags: int = 0) -> int:
        raise BrokenPipeError

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def watching():
    watches = []

    def start(connections: dict, rank: int) -> Alarm:
        alarm = Alarm()
        watches.append(HostWatch(connections, rank, 20, alarm))
        return alarm

    yield start
    for one in watches:
        one.close()


def test_a_silent_host_is_named_with_its_ranks_and_the_others_are_notified(watching):
    here, there = socket.socketpair()
    alarm = watching({TimesOut(): H3, here: H2}, 0)
    assert alarm.rung.wait(5)
    (error,) = alarm.errors
    assert error.problem == "host h3 (ranks 3, 4) is gone: it has not answered for 20 s"
    assert not error.everywhere
    assert there.recv(100) == b"host h3 (ranks 3, 4)"
    there.close()


def test_what_rank_0_reports_is_not_printed_twice(watching):
    here, there = socket.socketpair()
    alarm = watching({here: H1}, 2)
    there.sendall(b"host h3 (ranks 3, 4)")
    assert alarm.rung.wait(5)
    assert "host h3" in alarm.errors[0].problem
    assert alarm.errors[0].everywhere
    there.close()


def test_a_process_that_ends_is_not_a_lost_host(watching):
    here, there = socket.socketpair()
    other, silent = socket.socketpair()
    alarm = watching({here: H2, other: H3}, 0)
    there.close()
    assert not alarm.rung.wait(0.3)
    silent.close()


@pytest.mark.parametrize(("given", "seconds"), [(None, 20), ("", 20), ("0", 0), ("45", 45), ("soon", 20)])
def test_the_user_sets_how_long_a_host_may_be_silent(given, seconds):
    environ = {} if given is None else {"HVDTRAIN_HOST_SILENCE_SECONDS": given}
    assert silence_seconds(environ) == seconds


class OneHost:
    """Workers of one host."""

    rank, size, local_rank, local_size, host = 0, 2, 0, 2, "h1"

    def allgather_object(self, value: object) -> list[object]:
        return [value, value]

    def broadcast_object(self, value: object, root: int = 0) -> object:
        raise AssertionError("nothing is left to agree on")


def test_on_one_host_nothing_listens_and_no_thread_runs():
    before = threading.active_count()
    one, note = watch_hosts(OneHost(), Alarm())
    assert (threading.active_count(), note) == (before, "")
    one.close()
