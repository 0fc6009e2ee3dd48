"""What follows from another number of workers: the learning rate's way, and what is reported."""

import json
import threading

import pytest
from support.fakes import FakeBackend, FakeWorkers, make_loop_session
from support.watching import Watched, records

from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.jobs.elastic.world_state import report_change
from hvdtrain.jobs.entering import follow_workers
from hvdtrain.reporting.report import Report
from hvdtrain.run_state import RunState
from hvdtrain.schedule import Rescale
from hvdtrain.training_plan import Progress
from hvdtrain.workers.world import Change, World


def session_of(tmp_path, size: int, samples: int = 0, **fields):
    """Give a session of 10 epochs over 100 samples, in steps of 1 for each worker, at 0.1 for each."""
    workers = FakeWorkers(0, ["here"] * size, threading.Barrier(1), [b""])
    options = {"epochs": 10, "batch_size": 1, "learning_rate": 0.1, "rescale_epochs": 2, **fields}
    session = make_loop_session(tmp_path, FakeBackend(workers), train_size=100, **options)
    follow_workers(session)
    session.state.progress = Progress(samples // size, samples)
    return session


def next_world(generation: int, size: int, **change: object) -> World:
    return World(
        generation=generation, rank=0, size=size, local_rank=0, local_size=size, cross_rank=0, cross_size=1,
        host="here", store=("127.0.0.1", 1), one_host=True, salt="",
        change=Change(**change) if change else None,
    )  # fmt: skip


def resize(session, size: int, samples: int) -> None:
    session.state.progress = Progress(session.state.progress.step, samples)
    session.backend.workers.size = size
    follow_workers(session)


def peak(session) -> float:
    return session.plan().learning_rate.peak_at(session.epoch)


def test_the_peak_follows_the_workers_over_rescale_epochs(tmp_path):
    session = session_of(tmp_path, 1)
    resize(session, 3, samples=300)
    assert session.state.rescale == Rescale(peak=0.1, samples=300)
    peaks = []
    for samples in (300, 350, 400, 450, 500, 600):
        session.state.progress = Progress(300, samples)
        peaks.append(peak(session))
    assert peaks == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.3])


def test_with_local_steps_a_fixed_global_batch_has_a_peak_that_follows_the_workers(tmp_path):
    fields = {"global_batch_size": 12, "base_batch_size": 3, "sync_every": 2}
    session = session_of(tmp_path, 4, **fields)
    before = peak(session)
    resize(session, 2, samples=300)
    assert session.state.rescale == Rescale(peak=before, samples=300)
    assert peak(session) == pytest.approx(before)
    assert session.plan().learning_rate.peak == pytest.approx(2 * before)


def test_a_second_change_begins_where_the_first_has_come_to(tmp_path):
    session = session_of(tmp_path, 1)
    resize(session, 3, samples=300)
    resize(session, 5, samples=400)
    rescale = session.state.rescale
    assert (rescale.peak, rescale.samples) == (pytest.approx(0.2), 400)
    assert peak(session) == pytest.approx(0.2)
    follow_workers(session)  # nothing has changed
    assert session.state.rescale == rescale


def test_a_change_before_the_first_step_is_none(tmp_path):
    session = session_of(tmp_path, 1)
    resize(session, 3, samples=0)
    assert session.state.rescale is None


def test_a_run_that_resumes_goes_on_with_the_way_of_its_rate(tmp_path):
    session = session_of(tmp_path, 1)
    resize(session, 3, samples=300)
    session.state.progress = Progress(300, 400)
    manifest = Manifest.model_validate(json.loads(session.manifest().model_dump_json()))
    for size in (3, 1, 4):
        resumed = session_of(tmp_path, size)
        resumed.state = RunState.from_manifest(manifest, resumed.config)
        follow_workers(resumed)
        assert peak(resumed) == pytest.approx(0.2)
        assert (resumed.state.workers, resumed.state.rescale.samples) == (size, 300 if size == 3 else 400)


LEFT = "rank 2 on h2: killed (SIGKILL)"
EVENT = {
    "phase": "event",
    "step": 100,
    "samples": 300,
    "epoch": 3.0,
    "event": "changed",
    "left": [LEFT],
    "joined": [],
    "cause": "w9 left",
    "generation": 2,
    "pause_seconds": 0.812,
    "workers": 2,
}


def without_clock(record: dict) -> dict:
    return {name: value for name, value in record.items() if name != "seconds"}


def test_a_change_is_a_line_a_record_and_a_sum(tmp_path):
    session = session_of(tmp_path, 3, samples=300)
    watched = Watched(tmp_path)
    watched.report.on_start(334, 0)
    silent = Report()
    session.backend.workers.size = 2
    for report in (watched.report, silent):
        session.services.report = report
        report_change(session, next_world(2, 2, left=(LEFT,), why="w9 left"), 0.81234)
    watched.report.close()
    assert [without_clock(record) for record in records(tmp_path)] == [EVENT]
    assert [without_clock(record) for record in silent.recent] == [EVENT]
    assert watched.lines == [f"2 workers from step 101 on; left: {LEFT}; 0.8 s without training"]
    assert (session.state.changes, session.state.paused_seconds) == (2, pytest.approx(1.625, abs=1e-3))


def test_a_change_after_which_the_same_workers_go_on_says_its_cause(tmp_path):
    session, watched = session_of(tmp_path, 2, samples=300), Watched(tmp_path)
    watched.report.on_start(334, 0)
    session.services.report = watched.report
    report_change(session, next_world(2, 2, why="rank 1 on h1 lost its connection"), 1.0)
    watched.report.close()
    said = "2 workers from step 151 on; cause: rank 1 on h1 lost its connection; 1.0 s without training"
    assert watched.lines == [said]
