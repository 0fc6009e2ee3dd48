"""How whole jobs end when something fails: the error that is raised, and what is left on the disk."""

import json
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
from support.numpy_backend import NumpyDigits

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.verification import newest_verified
from hvdtrain.errors import TaskError, WorkerFailure


def test_a_task_that_cannot_describe_itself_is_a_failure_of_the_users_code(train, tmp_path):
    class Undescribed(NumpyDigits):
        def describe(self):
            raise ValueError("no words")

    with pytest.raises(WorkerFailure, match=r"test_job_ends.py, line \d+: ValueError: no words"):
        train(Undescribed, steps=2)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 0)


def test_callbacks_are_checked_before_anything_is_written(train, tmp_path):
    with pytest.raises(TaskError, match="has none of the methods"):
        train(callbacks=[object()], steps=2)
    assert not (tmp_path / "run").exists()


def test_sigterm_does_not_interrupt_the_save_at_the_end_of_a_job_that_failed(train, tmp_path, monkeypatch):
    begun, released, write = threading.Event(), threading.Event(), storage.write

    def write_slowly(*args):
        begun.set()
        assert released.wait(20)
        return write(*args)

    def terminate_and_release():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.3, released.set).start()

    def fail(step, _):
        if step.step == 12:
            assert begun.wait(20)
            threading.Timer(0.3, terminate_and_release).start()  # when the job waits for the save
            raise ValueError("boom")

    monkeypatch.setattr(storage, "write", write_slowly)
    with pytest.raises(WorkerFailure, match="boom"):
        train(callbacks=[SimpleNamespace(on_step=fail)], steps=20, save_every=10)
    assert released.is_set()
    newest = newest_verified(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000010"


def test_a_task_that_exits_has_not_completed(train, tmp_path):
    def leave(step, _):
        if step.step == 3:
            sys.exit(0)

    with pytest.raises(WorkerFailure, match=r"test_job_ends.py, line \d+: SystemExit: 0"):
        train(callbacks=[SimpleNamespace(on_step=leave)], steps=20)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "SystemExit" in summary["error"]
