"""How long a worker may write without its driver, by a clock that the tests set."""

import pytest

from hvdtrain.elastic.member.thread import Lease


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lease(clock):
    return Lease(20.0, clock)


def run(clock, lease, seconds: int, hears: bool = False) -> None:
    """Let a thread turn once a second."""
    for _ in range(seconds):
        clock.now += 1
        lease.turn()
        if hears:
            lease.renew()


def test_it_lasts_while_the_driver_is_heard(clock, lease):
    run(clock, lease, 100, hears=True)
    assert not lease.is_lost


def test_it_runs_out_without_the_driver(clock, lease):
    run(clock, lease, 20)
    assert not lease.is_lost
    run(clock, lease, 1)
    assert lease.is_lost
    assert lease.may_be_regained
    run(clock, lease, 4)
    assert lease.is_lost
    assert not lease.may_be_regained


def test_a_driver_that_comes_back_renews_it(clock, lease):
    run(clock, lease, 60)
    run(clock, lease, 1, hears=True)
    assert not lease.is_lost


def test_what_arrived_while_the_process_was_stopped_renews_nothing(clock, lease):
    clock.now += 60
    assert lease.is_lost  # before any thread but the one that asks has run
    assert lease.may_be_regained
    for _ in range(60):
        lease.renew()
    assert lease.is_lost
    run(clock, lease, 1, hears=True)
    assert lease.is_lost
    run(clock, lease, 2, hears=True)  # this one was sent after it woke
    assert not lease.is_lost
