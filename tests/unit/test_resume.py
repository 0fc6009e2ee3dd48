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


def refused(backend=None, data_size: int = 100, **fields) -> CheckpointError:
    """Give the error; the backend must be as it was."""
    backend = backend or make_backend(9.0)
    before = backend.local_state()
    with pytest.raises(CheckpointError) as caught:
        start(backend, data_size, **fields)
    assert equal(backend.local_state(), before)
    return caught.value


def make_run(folder, steps=(100, 120), **fields):
    """Write checkpoints of those steps, each with its step as its value, into a run directory."""
    return [saved(folder / "checkpoints", step, float(step), **fields) for step in steps]


def spoil(path) -> None:
    (path / "model.safetensors").write_bytes(b"x")


def test_auto_takes_the_newest_good_one(tmp_path):
    newest = make_run(tmp_path / "run")[-1].relative_to(tmp_path)
    backend = make_backend()
    found = start(backend, resume="auto", run_dir="run")
    assert found.origin == f"{newest}: step 120, sample 480 (epoch 4.80)"
    assert (found.progress, found.resumed_step, found.newest) == (Progress(120, 480), 120, newest)
    assert (found.notes, found.changes) == ((), ())
    assert equal(backend.local_state(), make_state(120.0))


def test_auto_sets_a_damaged_newest_one_aside_and_takes_the_one_before(tmp_path):
    good, newest = make_run(tmp_path / "run")
    spoil(newest)
    found = start(resume="auto", run_dir="run")
    assert found.newest == good.relative_to(tmp_path)
    assert len(found.notes) == 1
    assert "step-00000120 is damaged: model.safetensors has 1 bytes" in found.notes[0]
    assert names(good.parent) == ["set-aside-step-00000120", "step-00000100"]


@pytest.mark.parametrize("named", ["run", "run/checkpoints/step-00000120"])
def test_a_checkpoint_of_another_run_leaves_that_run_alone(tmp_path, named):
    make_run(tmp_path / "run")
    before = contents(tmp_path)
    found = start(resume=named, run_dir="elsewhere")
    assert (found.progress, found.resumed_step) == (Progress(120, 480), None)
    assert (found.newest, found.values) == (None, {})
    assert contents(tmp_path) == before


@pytest.mark.parametrize("named", ["run", "run/checkpoints/step-00000120", "./x/../run"])
def test_a_checkpoint_of_the_run_itself_goes_on_in_place(tmp_path, named):
    make_run(tmp_path / "run")
    (tmp_path / "x").mkdir()
    assert start(resume=named.format(here=tmp_path), run_dir="run").resumed_step == 120


def test_newer_ones_are_set_aside_where_a_run_goes_on_from_an_older_one(tmp_path):
    paths = make_run(tmp_path / "run", (80, 100, 120))
    found = start(resume=str(paths[1]), run_dir="run")
    assert found.resumed_step == 100
    assert found.notes == (f"checkpoint {paths[2]} is of a later step; set aside as set-aside-step-00000120",)
    assert names(paths[0].parent) == ["set-aside-step-00000120", "step-00000080", "step-00000100"]


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
    if "backend" in now:
        now = {"backend": make_backend(**now["backend"])}
    error = refused(resume="run", **now)
    assert said in error.problem
    assert "--init" in error.remedy


def test_a_named_one_that_is_damaged_is_refused_although_there_are_others(tmp_path):
    paths = make_run(tmp_path / "run")
    spoil(paths[1])
    error = refused(resume=str(paths[1]))
    assert "step-00000120 is damaged" in error.problem
    assert error.remedy == "In the same folder: step-00000100."


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch_size": 64}, ("batch_size 32 -> 64",)),
        ({"epochs": None, "steps": 500}, ("epochs 1 -> none", "steps none -> 500")),
        ({"lr_schedule": "step", "lr_step_epochs": (1, 2)},
         ("lr_schedule constant -> step", "lr_step_epochs [] -> [1.0, 2.0]")),
    ],
    ids=str,
)  # fmt: skip
def test_what_changed_in_the_config_is_said(tmp_path, fields, said):
    make_run(tmp_path / "run")
    assert start(resume="run", **fields).changes == said


def test_init_takes_the_weights_and_leaves_optimizer_and_progress(tmp_path):
    make_run(tmp_path / "run")
    backend = make_backend(9.0)
    found = start(backend, init="run", run_dir="elsewhere")
    assert found == ResumePoint(origin="weights of run/checkpoints/step-00000120, step 120")
    expected = {
        name: (make_state(9.0) if name.startswith("optimizer") else make_state(120.0))[name]
        for name in make_state()
    }
    assert equal(backend.local_state(), expected)


@pytest.mark.parametrize(
    ("keep_best", "values", "best"),
    [
        ("accuracy", [0.5, 0.9, 0.7], 0.9),
        ("accuracy", [None, 0.2, None], 0.2),
        (None, [0.5, 0.9, 0.7], None),
    ],
)
def test_the_best_value_so_far_is_known_again(tmp_path, keep_best, values, best):
    for step, value in enumerate(values, 1):
        make_run(tmp_path / "run", (step,), metrics={"accuracy": value})
    config = Config(**BASE, resume="auto", run_dir="run", keep_best=keep_best)
    assert restore(given_run(config, make_backend())).best_value(config) == best


AVERAGES = {"ema/a/kernel": np.full((3, 4), 7, np.float32)}


def save_state(tmp_path, state) -> None:
    (tmp_path / "run").mkdir()
    storage.write(tmp_path / "run" / "checkpoints", state, make_record(120))


@pytest.mark.parametrize(("averages", "said"), [({}, "weights of"), (AVERAGES, "EMA weights of")])
def test_init_takes_the_averages_where_there_are_some(tmp_path, averages, said):
    save_state(tmp_path, {**make_state(1.0), **averages})
    backend = make_backend(5.0)
    assert start(backend, init="run").origin.startswith(said)
    expected = averages.get("ema/a/kernel", make_state(1.0)["model/a/kernel"])
    np.testing.assert_array_equal(backend.local_state()["model/a/kernel"], expected)
