"""Why a job failed, told from the worker that failed to the one that writes the summary."""

import threading
import time

from hvdtrain.errors import PeerLostError, WorkerFailure
from hvdtrain.jobs import failures as failure_cause
from hvdtrain.jobs.failures import exchange_cause

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


def test_a_directory_that_this_host_does_not_have_is_not_made(tmp_path):
    exchange_cause(tmp_path / "elsewhere", 1, "h2", "the disk is full", WorkerFailure("x"))
    assert list(tmp_path.iterdir()) == []
