"""Agreement before training: everyone goes on, or everyone raises the same."""

import threading
import time

import pytest
from support.fakes import on_every_rank

from hvdtrain.errors import AgreementError, CheckpointError, PeerLostError
from hvdtrain.workers import agreement
from hvdtrain.workers.agreement import assert_consistent, run_on_rank_zero, waiting_for_rank_zero

HOSTS = ["alpha", "alpha", "beta", "beta"]


def test_a_disagreement_names_fact_rank_host_and_both_values():
    def state(workers):
        assert_consistent(workers, {"seed": 7 if workers.rank == 2 else 1, "same": 3})

    outcomes = on_every_rank(HOSTS, state)
    assert {(type(outcome), outcome.everywhere) for outcome in outcomes} == {(AgreementError, True)}
    (said,) = {outcome.problem for outcome in outcomes}
    assert said.endswith("\n  seed: 1 on rank 0 (alpha) and 2 more, 7 on rank 2 (beta)")


def test_what_rank_0_raises_is_raised_by_all_so_that_one_can_speak():
    def fail() -> None:
        raise CheckpointError("a: damaged", "Take b.")

    outcomes = on_every_rank(["here"] * 3, lambda workers: run_on_rank_zero(workers, fail))
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * 3
    assert {(o.problem, o.remedy, o.everywhere) for o in outcomes} == {("a: damaged", "Take b.", True)}


@pytest.fixture
def soon(monkeypatch):
    """Rank 0 answers every few milliseconds while it works."""
    monkeypatch.setattr(agreement, "_ANSWER_SECONDS", 0.01)


class Counting:
    """Workers that count their collectives and can lose a peer."""

    def __init__(self, workers, counts, lost_after=None) -> None:
        self._workers, self._counts, self._lost_after = workers, counts, lost_after

    def __getattr__(self, name):
        return getattr(self._workers, name)

    def broadcast_object(self, value):
        self._counts[self.rank] += 1
        if self._lost_after is not None and self._counts[self.rank] > self._lost_after:
            raise PeerLostError("gone")
        return self._workers.broadcast_object(value)


def wait_until(condition) -> None:
    """Wait until something holds, and a moment longer."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.05)


@pytest.mark.usefixtures("soon")
def test_while_rank_0_works_for_long_the_others_wait_in_short_collectives():
    counts, threads = [0, 0, 0, 0], []

    def work():
        threads.append(threading.current_thread())
        wait_until(lambda: counts[0] > 5)
        return "done"

    def run(workers):
        threads.append(threading.current_thread()) if workers.rank == 0 else None
        return run_on_rank_zero(Counting(workers, counts), work, "reading the checkpoint")

    assert on_every_rank(HOSTS, run) == ["done"] * 4
    assert len(set(counts)) == 1
    assert threads[0] is threads[1]  # a task's objects may be bound to their thread


@pytest.mark.usefixtures("soon")
def test_a_worker_that_goes_away_while_rank_0_works_is_an_error_after_the_work():
    done, counts = [], [0, 0]

    def run(workers):
        with waiting_for_rank_zero(Counting(workers, counts, lost_after=3), "saving"):
            if workers.rank == 0:
                wait_until(lambda: counts[0] > 3)
                done.append("saved")

    assert [type(outcome) for outcome in on_every_rank(["a", "b"], run)] == [PeerLostError] * 2
    assert done == ["saved"]
