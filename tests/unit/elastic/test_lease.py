"""How long a worker may write without its driver, and whose error it is that ends it."""

import errno
import os

import pytest

from hvdtrain import errors
from hvdtrain.elastic.member.orders import blame_for, hello
from hvdtrain.elastic.member.thread import Lease
from hvdtrain.errors import EnvironmentFault, Interrupted, WorkerFailure


class Ticking:
    """A lease of 20 seconds, by a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.lease = Lease(20.0, lambda: self.now)

    def run(self, seconds: int, hears: bool = False) -> None:
        """Let a thread turn once a second."""
        for _ in range(seconds):
            self.now += 1
            self.lease.turn()
            if hears:
                self.lease.renew()


def test_a_lease_lasts_while_the_driver_is_heard_and_runs_out_without():
    one = Ticking()
    one.run(100, hears=True)
    one.run(20)
    assert not one.lease.is_lost
    one.run(1)
    assert (one.lease.is_lost, one.lease.may_be_regained) == (True, True)
    one.run(4)
    assert (one.lease.is_lost, one.lease.may_be_regained) == (True, False)
    one.run(1, hears=True)  # the driver comes back
    assert not one.lease.is_lost


def test_what_arrived_while_the_process_was_stopped_renews_nothing():
    one = Ticking()
    one.now += 60
    assert one.lease.is_lost  # before any thread but the one that asks has run
    assert one.lease.may_be_regained
    for _ in range(60):
        one.lease.renew()
    assert one.lease.is_lost
    one.run(1, hears=True)
    assert one.lease.is_lost
    one.run(2, hears=True)  # this one was sent after it woke
    assert not one.lease.is_lost


def caused(cause):
    error = WorkerFailure("the task failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("blame", "found"),
    [
        # what would come again ends the job
        ("code", ["DataError", "NonFiniteLossError", "ReplicaDriftError", "WorkerFailure"]),
        ("code", ["AgreementError", "ExchangeError", "SaveError", ZeroDivisionError("a bug")]),
        ("code", [EnvironmentFault("x", everywhere=True), caused(ValueError("shapes differ"))]),
        ("code", [caused(FileNotFoundError(errno.ENOENT, "no file"))]),
        # the others go on without a worker whose host failed
        ("environment", ["EnvironmentFault", MemoryError(), OSError(errno.EIO, "disk"), Interrupted(2)]),
        ("environment", [caused(MemoryError()), caused(OSError(errno.ESTALE, "stale file handle"))]),
        ("peer", ["PeerLostError"]),
    ],
)
def test_whose_error_it_is(blame, found):
    raised = [getattr(errors, one)("x") if isinstance(one, str) else one for one in found]
    assert [blame_for(error) for error in raised] == [blame] * len(found)


def test_a_worker_says_where_it_is():
    said = hello({"HVDTRAIN_ELASTIC": "127.0.0.1:4000", "HOROVOD_HOSTNAME": "h2"})
    assert (said.host, said.pid) == ("h2", os.getpid())
    assert hello({"HVDTRAIN_ELASTIC": "127.0.0.1:4000"}).host == os.uname().nodename
