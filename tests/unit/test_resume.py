"""Where a run starts from, and what is refused, changed or kept on the way."""

import numpy as np
import pytest
from support.fakes import FakeBackend, given_run, one_worker
from support.states import contents, equal, make_record, make_state, names, saved

from hvdtrain.checkpoints import storage
from hvdtrain.config import Config
from hvdtrain.errors import CheckpointError
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.training_plan import Progress

BASE = {"framework": "torch", "epochs": 1}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_backend(value: float = 0.0, **changes: np.ndarray) -> FakeBackend:
    return FakeBackend(one_worker(), {**make_state(value), **changes})


def start(backend=None, data_size: int = 100, **fields) -> ResumePoint:
    return restore(given_run(Config(**{**BASE, **fields}), backend or make_backend(), data_size))


def make_run(folder, steps=(100, 120), **fields):
    """Write checkpoints of those steps, each with its step as its value, into a run directory."""
    return [saved(folder / "checkpoints", step, float(step), **fields) for step in steps]


def test_auto_takes_the_newest_good_one_and_sets_a_damaged_one_aside(tmp_path):
    good, newest = make_run(tmp_path / "run")
    backend = make_backend()
    found = start(backend, resume="auto", run_dir="run")
    assert found.origin == f"{newest.relative_to(tmp_path)}: step 120, sample 480 (epoch 4.80)"
    assert (found.progress, found.resumed_step) == (Progress(120, 480), 120)
    assert (found.notes, found.changes) == ((), ())
    assert equal(backend.local_state(), make_state(120.0))
    (newest / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="step-00000120 is damaged") as caught:
        start(resume=str(newest))
    assert caught.value.remedy == "In the same folder: step-00000100."
    found = start(resume="auto", run_dir="run")
    assert found.newest == good.relative_to(tmp_path)
    (note,) = found.notes
    assert "step-00000120 is damaged: model.safetensors has 1 bytes" in note
    assert names(good.parent) == ["set-aside-step-00000120", "step-00000100"]


@pytest.mark.parametrize("named", ["run", "run/checkpoints/step-00000120", "./x/../run"])
def test_a_checkpoint_of_another_run_leaves_that_run_alone_and_one_of_its_own_goes_on(tmp_path, named):
    make_run(tmp_path / "run")
    (tmp_path / "x").mkdir()
    before = contents(tmp_path)
    found = start(resume=named, run_dir="elsewhere")
    assert (found.progress, found.resumed_step) == (Progress(120, 480), None)
    assert (found.newest, found.values) == (None, {})
    assert contents(tmp_path) == before
    assert start(resume=named, run_dir="run").resumed_step == 120


@pytest.mark.parametrize(
    ("saved_with", "now", "said"),
    [
        ({"config": {**BASE, "task": "a/one.py:Task"}}, {"task": "a/two.py:Task"}, "on task a/one.py:Task; "),
        ({"data_size": 1437}, {"data_size": 1400}, "1,437 samples; the training data now has 1,400"),
        ({}, {"backend": {"model/a/kernel": np.zeros((3, 5), np.float32)}}, "does not fit the model"),
    ],
    ids=["task", "data", "model"],
)
def test_what_was_trained_on_something_else_is_refused(tmp_path, saved_with, now, said):
    make_run(tmp_path / "run", **saved_with)
    backend = make_backend(9.0, **now.pop("backend", {}))
    before = backend.local_state()
    with pytest.raises(CheckpointError) as caught:
        start(backend, **{"data_size": 100, **now, "resume": "run"})
    assert equal(backend.local_state(), before)
    assert said in caught.value.problem
    assert "--init" in caught.value.remedy


def test_what_changed_in_the_config_is_said(tmp_path):
    make_run(tmp_path / "run")
    found = start(resume="run", epochs=None, steps=500, lr_step_epochs=(1, 2))
    assert found.changes == ("epochs 1 -> none", "steps none -> 500", "lr_step_epochs [] -> [1.0, 2.0]")


@pytest.mark.parametrize("averages", [{}, {"ema/a/kernel": np.full((3, 4), 7, np.float32)}])
def test_init_takes_the_weights_or_averages_and_leaves_optimizer_and_progress(tmp_path, averages):
    (tmp_path / "run").mkdir()
    path = storage.write(tmp_path / "run" / "checkpoints", {**make_state(1.0), **averages}, make_record(120))
    backend = make_backend(9.0)
    found = start(backend, init="run", run_dir="elsewhere")
    said = "EMA weights" if averages else "weights"
    assert found == ResumePoint(origin=f"{said} of {path.relative_to(tmp_path)}, step 120")
    one, other = make_state(1.0), make_state(9.0)
    expected = {name: (other if name.startswith("optimizer") else one)[name] for name in one}
    expected |= {name.replace("ema", "model"): average for name, average in averages.items()}
    assert equal(backend.local_state(), expected)


@pytest.mark.parametrize(
    ("keep_best", "values", "best"),
    [("accuracy", [0.5, 0.9], 0.9), ("accuracy", [None, 0.2, None], 0.2), (None, [0.5, 0.9, 0.7], None)],
)
def test_the_best_value_so_far_is_known_again(tmp_path, keep_best, values, best):
    for step, value in enumerate(values, 1):
        make_run(tmp_path / "run", (step,), metrics={"accuracy": value})
    config = Config(**BASE, resume="auto", run_dir="run", keep_best=keep_best)
    assert restore(given_run(config, make_backend())).best_value(config) == best
