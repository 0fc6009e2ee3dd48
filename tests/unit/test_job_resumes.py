"""Whole jobs in this process, without a framework: stopped, killed and gone on with, over real files."""

import errno
import json
import os
import signal

import numpy as np
import pytest
from support.fakes import FakeBackend, one_worker
from support.states import equal, names

from hvdtrain.checkpoints import storage
from hvdtrain.config import Layer
from hvdtrain.early_stopping import MEASURES
from hvdtrain.errors import CheckpointError, Interrupted, SaveError, Stopped, WorkerFailure
from hvdtrain.horovod_build.installed import InstalledBuild
from hvdtrain.jobs.opening import start as starting
from hvdtrain.jobs.train import run_job

BUILD = InstalledBuild("0.28.1", "2.13.0", None, None, gloo=True, nccl=False)
FIELDS = {"framework": "torch", "task": "small", "epochs": 2, "batch_size": 4, "run_dir": "run"}


class Small:
    loss = "mse"
    metrics = {"accuracy": "accuracy"}  # noqa: RUF012

    torch_model = print  # the fake backend needs none

    def train_data(self) -> object:
        return {"inputs": np.arange(10.0), "targets": np.arange(10)}

    def eval_data(self) -> object:
        return {"inputs": np.arange(7.0), "targets": np.arange(7)}


class Learning(FakeBackend):
    """A fake backend with weights that depend on every sample, in its order, and on the rate.

    ``at`` holds what to do before a step, by its number.
    """

    def __init__(self, at=None) -> None:
        state = {"model/w/kernel": np.zeros(2), "optimizer/momentum/w/kernel": np.zeros(2)}
        super().__init__(one_worker(), state)
        self._at = at or {}

    def train_step(self, batch, learning_rate, signals):
        self._at.get(batch.step + 1, lambda: None)()
        pending = super().train_step(batch, learning_rate, signals)
        model, momentum = self.state.values()
        momentum *= 0.9
        for place, index in enumerate(batch.indices[batch.weights > 0]):
            momentum += np.asarray([index, index * place])
        model += learning_rate * momentum
        return pending


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs a job in ``tmp_path``; ``at`` holds what happens before a step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "require_horovod", lambda framework: BUILD)
    monkeypatch.setattr(starting.environment, "prepare", dict)

    def start(at=None, **fields):
        monkeypatch.setattr(starting, "load_backend", lambda *_: Learning(at))
        return run_job([Layer("options", {**FIELDS, "log_every": 1, **fields})], Small)

    return start


def send(number: int):
    return lambda: signal.raise_signal(number)


def written(folder) -> list[dict]:
    """Give the log without what depends on the clock."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocked = {"seconds", *MEASURES} - {"learning_rate"}
    return [{name: value for name, value in one.items() if name not in clocked} for one in records]


def summary(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def final_state(folder):
    found = storage.locate(folder)
    assert found.manifest.step == 5
    return found.read()


@pytest.mark.parametrize(
    ("what", "error", "save_every"),
    [(send(15), Stopped, None), (send(signal.SIGINT), Interrupted, 1), (lambda: 1 / 0, WorkerFailure, None)],
)
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(train, tmp_path, what, error, save_every):
    train(run_dir="whole", log_every=3)
    fields = {"save_every": save_every, "resume": "auto", "log_every": 3, "trace_indices": True}
    with pytest.raises(error):
        train({2: what}, **fields)
    found = train(**fields)
    assert (found.status, found.steps, found.failed_saves) == ("completed", 5, 0)
    assert equal(final_state(tmp_path / "run"), final_state(tmp_path / "whole"))
    assert written(tmp_path / "run") == written(tmp_path / "whole")
    lines = (tmp_path / "run" / "indices" / "rank-0000.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_going_on_elsewhere_leaves_the_first_run_alone(train, tmp_path):
    train(run_dir="whole")
    with pytest.raises(Stopped):
        train({2: send(signal.SIGTERM)})
    log, left = written(tmp_path / "run"), names(tmp_path / "run" / "checkpoints")
    train(run_dir="second", resume="run")
    assert (written(tmp_path / "run"), names(tmp_path / "run" / "checkpoints")) == (log, left)
    assert equal(final_state(tmp_path / "second"), final_state(tmp_path / "whole"))
    assert log + written(tmp_path / "second") == written(tmp_path / "whole")


@pytest.fixture
def _full_disk(monkeypatch):
    """A disk on which no checkpoint can be synced any more."""

    def fsync(descriptor):
        if "checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage.os, "fsync", fsync)


@pytest.mark.usefixtures("_full_disk")
def test_training_goes_on_where_nothing_can_be_saved_unless_the_config_says_stop(train, tmp_path, capsys):
    with pytest.raises(SaveError) as caught:  # the last state is lost
        train(save_every=1)
    assert caught.value.problem == "the checkpoint could not be written: step 5: No space left on device"
    found = summary(tmp_path / "run")
    assert (found["status"], found["checkpoint"], found["failed_saves"]) == ("unsaved", None, 5)
    assert found["save_error"] == "step 5: No space left on device"
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("cannot write the checkpoint of") == 1
    assert "5 checkpoints could not be written" in said
    with pytest.raises(SaveError) as caught:
        train(save_every=1, on_save_error="stop", run_dir="stopped")
    assert "No space left on device" in caught.value.problem
    assert caught.value.remedy.startswith("Newest good one: none.")
    assert caught.value.everywhere
    assert "on_save_error is stop" in summary(tmp_path / "stopped")["error"]


def test_a_run_whose_data_changed_is_resumed_on_request_alone(train, tmp_path, monkeypatch, capsys):
    train(epochs=1)
    monkeypatch.setattr(Small, "eval_data", lambda self: {"inputs": np.ones(7), "targets": np.arange(7)})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"the evaluation data changed since .*: sample 0 has another"):
        train(resume="auto")
    assert sorted(tmp_path.rglob("*")) == before
    capsys.readouterr()
    assert train(resume="auto", on_changed_data="warn").steps == 6
    assert "note: the evaluation data changed since checkpoint run/checkpoints/" in capsys.readouterr().out
    assert train(resume="auto", epochs=3).steps == 9  # the newest checkpoint has the new data
