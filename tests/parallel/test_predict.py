"""Predictions: the model's outputs for every sample, in the data's order, with any number of workers."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from predict_task import SAMPLES, expected
from support.jobs import FRAMEWORKS
from support.pool import Key, call, controller_of, shared_run

TASK = str(Path(__file__).with_name("predict_task.py"))


def source(framework):
    return str(shared_run(1, "none", "--framework", framework, "--task", f"{TASK}:Unlabelled").folder)


def predict(framework, workers, *commands, cwd):
    """Run predict on each; return what rank 0 printed, and its error or nothing."""
    key = Key(framework, controller_of(framework, workers), workers)
    lines = [
        ["predict", source(framework), "--task", f"{TASK}:{task}", *options] for task, *options in commands
    ]
    done = call(key, "support.cases:commands", cwd, commands=lines)
    return [tuple(result) for result in done.values[0]]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_are_in_the_order_of_the_data_without_padding(framework, tmp_path):
    done = call(
        Key(framework, "none", 1),
        f"{TASK}:loaded",
        tmp_path,
        framework=framework,
        checkpoint=source(framework),
    )
    loaded = [np.array(values) for values in done.values[0]]
    (one,) = predict(framework, 1, ("Unlabelled", "--output", "one.npz"), cwd=tmp_path)
    two, served = predict(
        framework,
        2,
        ("Unlabelled", "--output", "two.parquet", "--set", "eval_batch_size=3"),
        ("Served", "--output", "served.npz"),
        cwd=tmp_path,
    )
    assert [error for _, error in (one, two, served)] == ["", "", ""]
    assert f"predictions: one.npz ({SAMPLES} samples of the data to predict: outputs float32 (2,))" in one[0]
    assert "note: without mean, which is one value for a whole batch" in served[0]
    wanted = expected(loaded)
    found = np.load(tmp_path / "one.npz")
    assert found.files == ["outputs"]
    np.testing.assert_allclose(found["outputs"], wanted, atol=1e-5)
    table = pq.read_table(tmp_path / "two.parquet")
    np.testing.assert_allclose(np.array(table["outputs"].to_pylist()), wanted, atol=1e-5)
    arrays, pair = np.load(tmp_path / "served.npz"), expected(loaded, "Served")
    assert arrays.files == ["pair", "grid"]
    np.testing.assert_allclose(arrays["pair"], pair, atol=1e-5)
    np.testing.assert_allclose(arrays["grid"], pair[:, :, None] * pair[:, None], atol=1e-5)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_cannot_be_predicted_is_refused(tmp_path):
    (tmp_path / "there.npz").write_text("precious")
    refusals = {
        ("Twice", "--output", "x.npz"): "the task's torch_loss or torch_step calls the model itself",
        ("Served", "--output", "x.npz", "--split", "predict"): f"task {TASK}:Served has no predict_data()",
        ("Bare", "--output", "x.npz"): f"eval_data() of task {TASK}:Bare gave None: there are no samples",
        ("Served", "--output", "x.csv"): "--output x.csv: predictions are written to files that end with",
        ("Served", "--output", "there.npz"): "there.npz exists",
    }
    for said, (_, error) in zip(refusals.values(), predict("torch", 1, *refusals, cwd=tmp_path), strict=True):
        assert error.startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["there.npz"]
    assert (tmp_path / "there.npz").read_text() == "precious"
