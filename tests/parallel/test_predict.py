"""Predictions: the model's outputs for every sample, in the data's order, with any number of workers."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.pool import Key, call, controller_of, shared_run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from predict_task import SAMPLES, expected  # noqa: E402

FRAMEWORKS = ("torch", "tf")
TASK = str(HERE / "predict_task.py")


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


def weights(framework, tmp_path):
    """Return kernel and bias of the model that hvdtrain.load returns."""
    arguments = [source(framework), f"{TASK}:Unlabelled", framework, str(tmp_path / "weights.json")]
    call(
        Key(framework, "none", 1),
        "support.cases:script",
        tmp_path,
        path=str(HERE / "job_load_model.py"),
        arguments=arguments,
    )
    return [np.array(values) for values in json.loads((tmp_path / "weights.json").read_text())]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_are_in_the_order_of_the_data_without_padding(framework, tmp_path):
    loaded = weights(framework, tmp_path)
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


@pytest.mark.parametrize("framework", ["torch"])
def test_what_cannot_be_predicted_is_refused(framework, tmp_path):
    (tmp_path / "there.npz").write_text("precious")
    results = predict(
        framework,
        1,
        ("Twice", "--output", "x.npz"),
        ("Served", "--output", "x.npz", "--split", "predict"),
        ("Served", "--output", "x.csv"),
        ("Served", "--output", "there.npz"),
        ("Served", "--output", "x.npz", "--set", "on_bad_sample=skip"),
        ("Served", "--output", "x.npz", "--set", "eval_batch_size=100000000"),
        cwd=tmp_path,
    )
    for (_, error), said in zip(
        results,
        (
            "the task's torch_loss or torch_step calls the model itself",
            f"task {TASK}:Served has no predict_data()",
            "--output x.csv: predictions are written to files that end with .npz or .parquet",
            "there.npz exists",
            "on_bad_sample skip cannot be used by predict: predictions have a row for every sample",
            "eval_batch_size: a batch of all workers has 100,000,000 samples",
        ),
        strict=True,
    ):
        assert error.startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["there.npz"]
    assert (tmp_path / "there.npz").read_text() == "precious"
