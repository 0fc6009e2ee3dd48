"""How whole jobs end when something fails: the error that is raised, and what is left on the disk."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from support.numpy_backend import NumpyDigits

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.storage import newest_verified
from hvdtrain.errors import EnvironmentFault, TaskError, WorkerFailure
from hvdtrain.reporting.run_report import RunReport


def test_sigterm_does_not_interrupt_the_save_at_the_end_of_a_job_that_failed(train, tmp_path, monkeypatch):
    begun, released, write = threading.Event(), threading.Event(), storage.write

    def write_slowly(*args):
        begun.set()
        assert released.wait(60)
        return write(*args)

    def terminate_and_release():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.3, released.set).start()

    def fail(step, _):
        if step.step == 12:
            assert begun.wait(60)
            threading.Timer(0.3, terminate_and_release).start()  # when the job waits for the save
            raise ValueError("boom")

    monkeypatch.setattr(storage, "write", write_slowly)
    with pytest.raises(WorkerFailure, match="boom"):
        train(callbacks=[SimpleNamespace(on_step=fail)], steps=20, save_every=10)
    assert released.is_set()
    newest = newest_verified(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000010"


def test_what_was_opened_is_closed_if_what_is_opened_after_it_fails(train, monkeypatch):
    closed, close = [], RunReport.close

    def fail(*_):
        raise OSError(28, "full")

    def close_and_count(report):
        closed.append(report)
        close(report)

    monkeypatch.setattr(RunReport, "close", close_and_count)
    monkeypatch.setattr("hvdtrain.jobs.entering.saver_of", fail)
    with pytest.raises((OSError, EnvironmentFault), match="full"):
        train(steps=2)
    assert len(closed) == 1


class _Own(BaseException):
    """An exception of a task that is no Exception."""


@pytest.mark.parametrize(
    ("method", "hook", "raised"),
    [("__init__", "on_start", SystemExit(0)), ("numpy_model", "on_step", _Own("mine"))],
)
def test_a_task_that_leaves_before_training_is_mistaken_and_a_callback_that_leaves_fails(
    train, method, hook, raised
):
    def leave(*_):
        raise raised

    with pytest.raises(TaskError, match=rf"test_job_ends.py, line \d+: {type(raised).__name__}: "):
        train(type("Leaving", (NumpyDigits,), {method: leave}), steps=2)
    with pytest.raises(WorkerFailure, match=rf"failed in {hook}: .*{type(raised).__name__}: "):
        train(callbacks=[SimpleNamespace(**{hook: leave})], steps=2, log_every=1)
