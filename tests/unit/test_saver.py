"""Saving in the background: one at a time, what is kept, and what happens when it fails."""

import errno
import math
import os
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.fakes import FakeReport, one_worker
from support.states import equal, make_record, make_state, names

from hvdtrain.checkpoints import saver as saving
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.saver import BackgroundSaver
from hvdtrain.early_stopping import MetricGoal


class Backend:
    """A backend whose snapshots can be held up or fail."""

    def __init__(self) -> None:
        self.value = 0.0
        self.workers = one_worker()
        self.go_on = threading.Event()
        self.go_on.set()

    def gather_state(self, spool=None):
        state = make_state(self.value)

        def read():
            assert self.go_on.wait(60)
            return state

        return SimpleNamespace(read=read)


class Job:
    """A saver over a real folder, and what it told."""

    def __init__(self, folder, **options) -> None:
        self.folder = folder
        self.report = FakeReport()
        self.backend = Backend()
        self.saver = BackgroundSaver(folder, self.report, **{"keep_last": None, **options})

    def save(self, step: int, **fields) -> None:
        """Save and wait until it is done."""
        self.saver.save(self.backend, make_record(step, **fields))
        self.saver.finish()

    def save_each(self, values, metric: str = "accuracy") -> list[int]:
        """Save a step for each value of a metric; give the steps that are left."""
        for step, value in enumerate(values, 1):
            self.save(step, metrics={} if value == "none" else {metric: value})
        return [storage.step_of(path) for path in storage.checkpoints_in(self.folder)]


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path / "checkpoints")


def test_a_state_whose_parameters_are_not_finite_takes_no_good_ones_place(tmp_path):
    job = Job(tmp_path / "checkpoints", keep_last=1, parameters=["model/a/kernel"])
    job.save(7)
    job.backend.value = math.nan
    job.save(8)
    assert job.saver.not_finite == "12 of 12 numbers of model/a/kernel are not finite after step 8"
    assert job.saver.poll() is True
    assert (job.saver.newest, job.saver.failures) == (job.folder / "step-00000007", [])
    assert names(job.folder) == ["step-00000007"]


def test_a_complete_checkpoint_is_reported_once_by_the_thread_that_trains(job):
    seen = []
    job.report.sync = lambda: seen.append(job.folder.exists())
    job.saver.save(job.backend, make_record(7))
    watcher = threading.Thread(target=job.saver.finish)
    watcher.start()
    watcher.join()
    assert job.saver.newest is not None
    assert job.report.checkpoints == []
    assert seen == [False], "the log is on the disk before"
    job.saver.poll()
    job.save(9)
    job.saver.finish()
    assert job.report.checkpoints == [(step, job.folder / f"step-{step:08d}") for step in (7, 9)]


def test_a_checkpoint_has_the_state_of_its_step_however_late_it_is_written(job):
    job.backend.go_on.clear()
    job.backend.value = 1.0
    job.saver.save(job.backend, make_record(7))
    job.backend.value = 2.0
    job.backend.go_on.set()
    job.saver.finish()
    assert equal(storage.verify(job.saver.newest).read(), make_state(1.0))


def test_the_next_save_waits_for_the_one_in_flight(job, monkeypatch):
    writing, most = set(), []
    write = storage.write

    def watched(folder, state, manifest, check):
        writing.add(manifest.step)
        most.append(len(writing))
        path = write(folder, state, manifest, check)
        writing.remove(manifest.step)
        return path

    monkeypatch.setattr(saving.storage, "write", watched)
    for step in range(1, 9):
        job.saver.save(job.backend, make_record(step))
    job.saver.finish()
    assert most == [1] * 8
    assert len(names(job.folder)) == 8


def test_the_newest_are_kept(tmp_path):
    assert Job(tmp_path / "all", keep_last=None).save_each(["none"] * 4) == [1, 2, 3, 4]
    assert Job(tmp_path / "some", keep_last=3).save_each(["none"] * 4) == [2, 3, 4]


@pytest.mark.parametrize(
    ("best", "values", "left"),
    [
        ("accuracy", [0.5, 0.9, 0.9, 0.9], [2, 4]),
        ("accuracy", ["none", 0.1, "none", "none"], [2, 4]),
        ("accuracy", [0.5, None, None, None], [1, 4]),
        ("accuracy:min", [0.5, 0.1, 0.1, 0.8], [2, 4]),
    ],
    ids=str,
)
def test_the_best_is_kept_beside_the_newest(tmp_path, best, values, left):
    assert Job(tmp_path, keep_last=1, best=MetricGoal.parse(best)).save_each(values) == left


def test_the_next_save_tries_again(job, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        job.save(7)
    job.save(8)
    assert job.saver.newest == job.folder / "step-00000008"
    assert job.saver.failures == ["step 7: No space left on device"]
    assert names(job.folder) == ["step-00000008"]
