"""Why a job failed, told from the worker that failed to the one that writes the summary."""

import threading
import time

import pytest

from hvdtrain.errors import Interrupted, PeerLostError, WorkerFailure
from hvdtrain.jobs import failure_cause
from hvdtrain.jobs.failure_cause import exchange_cause, forget_causes

LOST = PeerLostError("another worker ended")


def test_rank_0_names_what_another_worker_left(tmp_path):
    assert exchange_cause(tmp_path, 1, "h2", "the disk is full", WorkerFailure("x")) == "the disk is full"
    assert exchange_cause(tmp_path, 0, "h1", LOST.problem, LOST) == "rank 1 on h2: the disk is full"
    assert list(tmp_path.iterdir()) == []


def test_it_waits_a_moment_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(failure_cause, "_WAIT_SECONDS", 60)

    def late() -> None:
        time.sleep(0.15)
        exchange_cause(tmp_path, 3, "h2", "late", WorkerFailure("x"))

    thread = threading.Thread(target=late)
    thread.start()
    assert exchange_cause(tmp_path, 0, "h1", LOST.problem, LOST) == "rank 3 on h2: late"
    thread.join()


def test_without_a_cause_it_is_that_another_worker_ended(tmp_path):
    assert exchange_cause(tmp_path, 0, "h1", LOST.problem, LOST) == LOST.problem


@pytest.mark.parametrize("error", [LOST, Interrupted(15), None], ids=repr)
def test_a_worker_that_did_not_fail_itself_leaves_nothing(tmp_path, error):
    assert exchange_cause(tmp_path, 1, "h2", "ended", error) == "ended"
    assert list(tmp_path.iterdir()) == []


def test_rank_0s_own_problem_is_its_own(tmp_path):
    exchange_cause(tmp_path, 1, "h2", "other", WorkerFailure("x"))
    assert exchange_cause(tmp_path, 0, "h1", "own", WorkerFailure("own")) == "own"
    forget_causes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_this_host_does_not_have_is_not_made(tmp_path):
    exchange_cause(tmp_path / "elsewhere", 1, "h2", "the disk is full", WorkerFailure("x"))
    assert list(tmp_path.iterdir()) == []
