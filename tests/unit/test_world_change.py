"""What follows from another number of workers: the learning rate's way, and what is reported."""

import json
import threading

import pytest
from support.fakes import FakeBackend, FakeWorkers, make_loop_session

from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.jobs.world_change import follow_workers
from hvdtrain.run_state import RunState
from hvdtrain.schedule import Rescale
from hvdtrain.training_plan import Progress


def session_of(tmp_path, size: int, samples: int = 0, **fields):
    """Give a session of 10 epochs over 100 samples, in steps of 1 for each worker, at 0.1 for each."""
    workers = FakeWorkers(0, ["here"] * size, threading.Barrier(1), [b""])
    options = {"epochs": 10, "batch_size": 1, "learning_rate": 0.1, "rescale_epochs": 2, **fields}
    session = make_loop_session(tmp_path, FakeBackend(workers), train_size=100, **options)
    follow_workers(session)
    session.state.progress = Progress(samples // size, samples)
    return session


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


def test_a_second_change_begins_where_the_first_has_come_to(tmp_path):
    session = session_of(tmp_path, 1)
    resize(session, 3, samples=300)
    resize(session, 5, samples=400)
    rescale = session.state.rescale
    assert (rescale.peak, rescale.samples) == (pytest.approx(0.2), 400)
    assert peak(session) == pytest.approx(0.2)
    follow_workers(session)  # nothing has changed
    assert session.state.rescale == rescale


@pytest.mark.parametrize(
    "fields", [{"rescale_epochs": 0}, {"global_batch_size": 12}, {"lr_scaling": "none"}], ids=str
)
def test_otherwise_the_rate_follows_at_once_or_has_no_reason_to(tmp_path, fields):
    session = session_of(tmp_path, 1, **fields)
    resize(session, 3, samples=300)
    assert session.state.rescale is None
    assert peak(session) == session_of(tmp_path, 3, **fields).plan().learning_rate.peak


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
