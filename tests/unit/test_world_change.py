"""What is reported of another number of workers."""

import threading

import pytest
from support.fakes import FakeBackend, FakeWorkers, make_loop_session
from support.watching import Watched, records

from hvdtrain.jobs.elastic.world_state import report_change
from hvdtrain.reporting.report import Report
from hvdtrain.training_plan import Progress
from hvdtrain.workers.world import Change, World


def session_of(tmp_path, size: int, samples: int):
    """Give a session of 10 epochs over 100 samples, in steps of 1 for each worker."""
    workers = FakeWorkers(0, ["here"] * size, threading.Barrier(1), [b""])
    session = make_loop_session(
        tmp_path, FakeBackend(workers), train_size=100, epochs=10, batch_size=1, learning_rate=0.1
    )
    session.state.progress = Progress(samples // size, samples)
    return session


def next_world(generation: int, size: int, **change: object) -> World:
    return World(
        generation=generation, rank=0, size=size, local_rank=0, local_size=size, cross_rank=0, cross_size=1,
        host="here", store=("127.0.0.1", 1), one_host=True, salt="",
        change=Change(**change) if change else None,
    )  # fmt: skip


LEFT = "rank 2 on h2: killed (SIGKILL)"


def test_a_change_is_a_line_a_record_and_a_sum(tmp_path):
    session, watched, silent = session_of(tmp_path, 3, samples=300), Watched(tmp_path), Report()
    watched.report.on_start(334, 0)
    session.backend.workers.size = 2
    for report in (watched.report, silent):
        session.services.report = report
        report_change(session, next_world(2, 2, left=(LEFT,), why="w9 left"), 0.81234)
    watched.report.close()
    expected = {
        "phase": "event", "step": 100, "samples": 300, "epoch": 3.0, "event": "changed", "left": [LEFT],
        "joined": [], "cause": "w9 left", "generation": 2, "pause_seconds": 0.812, "workers": 2,
    }  # fmt: skip
    for record in (*records(tmp_path), *silent.recent):
        assert {**record, "seconds": 0} == {**expected, "seconds": 0}
    assert watched.lines == [f"2 workers from step 101 on; left: {LEFT}; 0.8 s without training"]
    assert (session.state.changes, session.state.paused_seconds) == (2, pytest.approx(1.625, abs=1e-3))
