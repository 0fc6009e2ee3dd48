"""What signals ask of a worker: at a step where it trains, at once elsewhere."""

import signal
import sys
from unittest.mock import Mock

import pytest

from hvdtrain.backends.step_metrics import NO_FLAGS, ControlFlags
from hvdtrain.errors import Interrupted, PeerLostError, Removed, WorkerFailure
from hvdtrain.host.processes import HANDLED
from hvdtrain.jobs.failures import Signals, interruptible


@pytest.fixture(autouse=True)
def _handlers():
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP])
def test_while_training_a_stop_waits_for_a_step(number):
    with interruptible() as signals, signals.defer_to_step_boundary():
        signal.raise_signal(number)
        assert signals.poll() == ControlFlags(stop=True)
    assert signals.number == number


def test_ctrl_c_ends_what_waits_for_a_step():
    def stop_twice() -> None:
        with interruptible() as signals, signals.defer_to_step_boundary():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="SIGINT"):
        stop_twice()


@pytest.mark.parametrize("number", HANDLED)
def test_after_an_interruption_no_signal_disturbs_the_ending(number):
    ended = []

    def ends_slowly() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(number)
            ended.append(True)

    with pytest.raises(Interrupted, match="SIGINT"), interruptible():
        ends_slowly()
    assert ended == [True]


def test_a_save_is_asked_for_once_for_each_signal():
    with interruptible() as signals:
        asked = [signals.poll()]
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
            asked += [signals.poll(), signals.poll()]
    assert asked == [NO_FLAGS, *[ControlFlags(save=True), NO_FLAGS] * 2]


def test_an_error_after_a_signal_counts_as_the_signal():
    def fail(signals: Signals) -> None:
        with signals.signals_take_precedence():
            signals.number = signal.SIGTERM
            raise PeerLostError("left alone")

    with pytest.raises(Interrupted, match="SIGTERM") as caught:
        fail(Signals())
    assert isinstance(caught.value.__cause__, PeerLostError)


def test_the_exit_of_the_tasks_code_is_an_error():
    said = r"called sys.exit\(\): .*test_signals.py, line \d+: SystemExit: 0"
    with pytest.raises(WorkerFailure, match=said), interruptible():
        sys.exit(0)


def asked(stop: int = 0) -> Mock:
    """A membership that notes what is asked of it."""
    return Mock(orders=Mock(stop=stop, wants_change=False))


def test_one_worker_of_an_elastic_job_leaves_it_unless_all_are_to_stop():
    with interruptible() as signals, signals.defer_to_step_boundary():
        signals.membership = asked()
        signal.raise_signal(signal.SIGHUP)
        assert signals.poll() == NO_FLAGS  # the driver tells all workers of it
    signals.membership.leave.assert_called_once_with("SIGHUP came")
    assert signals.number is None
    with interruptible() as signals, signals.defer_to_step_boundary():
        signals.membership = asked(stop=signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    signals.membership.leave.assert_not_called()


def test_a_worker_that_is_alone_leaves_an_elastic_job_at_once():
    membership = asked()

    def leave_early() -> None:
        with interruptible() as signals:
            signals.membership = membership
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Removed, match="SIGTERM"):
        leave_early()
    membership.leave.assert_called_once_with("SIGTERM came")
