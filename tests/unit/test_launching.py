"""``hvdtrain.launch``: what it refuses, how functions travel, and which error comes back."""

import io
import os
import pickle
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

import hvdtrain
from hvdtrain import errors
from hvdtrain.errors import EnvironmentFault, UsageError, WorkerFailure
from hvdtrain.jobs import launch


def nothing() -> None:
    pass


def test_wrong_arguments_a_worker_that_launches_and_a_missing_horovodrun_are_refused(monkeypatch, tmp_path):
    for fn, given, words in (
        (3, {}, "takes a function, found a int"),
        (nothing, {"np": 0}, "np must be a whole number"),
        (nothing, {"controller": "nccl"}, "controller 'mpi', 'gloo' or None, found 'nccl'"),
        (nothing, {"args": [threading.Lock()]}, "cannot be sent to the workers"),
    ):
        with pytest.raises(UsageError, match=words):
            hvdtrain.launch(fn, **given)
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(UsageError, match="one of 2 that horovodrun started"):
        hvdtrain.launch(nothing)

    monkeypatch.delenv("HOROVOD_RANK")
    monkeypatch.delenv("HOROVOD_SIZE")
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="build-horovod"):
        hvdtrain.launch(nothing)


def sent(kind: str, rank: int = 1, **changes: object) -> dict:
    values = {"rank": rank, "host": "h", "kind": kind, "problem": "why", "remedy": "do", "signal": None}
    return {**values, **changes}


def raised(*found: dict) -> BaseException:
    return launch.error_of(found, 1)


def test_the_cause_comes_back_and_not_what_it_was_for_others_or_that_the_launcher_ended_them():
    assert isinstance(raised(sent("PeerLostError", 0), sent("TaskError", 1)), errors.TaskError)
    assert isinstance(raised(sent("PeerLostError", 0)), errors.PeerLostError)
    ended = sent("Interrupted", 0, signal=15)
    error = launch.error_of([ended], 137)
    assert isinstance(error, EnvironmentFault)
    assert error.problem == "the workers ended with exit code 137; rank 0 on h was ended by SIGTERM"
    assert isinstance(raised(ended, sent("PeerLostError", 1)), errors.PeerLostError)
    assert isinstance(raised(ended, sent("ConfigError", 1)), errors.ConfigError)


def test_what_workers_still_print_when_the_script_is_ended_is_shown(monkeypatch):
    ends = "signal.signal(15, lambda *_: (print('x' * 300_000 + 'saved', flush=True), sys.exit(0)))"
    code = f"import signal, sys, time; {ends}; print('begun', flush=True); time.sleep(600)"
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    wait = subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if timeout is None and not shown.getvalue():
            while not shown.getvalue():
                time.sleep(0.05)
            sys.exit(3)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(SystemExit):
        launch.run_command([sys.executable, "-c", code], dict(os.environ))
    assert shown.getvalue().endswith("xsaved\n")


class Left(Exception):
    """Stands in for the end of the process."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.Interrupted(2), KeyboardInterrupt),
        (errors.Interrupted(15), EnvironmentFault),
        (errors.Stopped("it has"), errors.Stopped),
        (errors.ConfigError("no"), errors.ConfigError),
        (ValueError("no"), WorkerFailure),
    ],
)
def test_errors_and_signals_of_workers_come_back(tmp_path, monkeypatch, error, kind):
    monkeypatch.setattr(launch.os, "_exit", mock.Mock(side_effect=Left))
    with pytest.raises(Left):
        launch._fail(tmp_path, 1, error)
    assert type(raised(pickle.loads((tmp_path / launch.ERROR.format(1)).read_bytes()))) is kind
