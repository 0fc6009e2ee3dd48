"""Whole jobs on streams, through the numpy backend: curves, resuming, plans, refusals."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from support.numpy_backend import Mlp

import hvdtrain
from hvdtrain.errors import CheckpointError, DataError

SIZE, EVAL_SIZE = 50, 23


def sample(number):
    inputs = np.random.default_rng(number).standard_normal(4).astype(np.float32)
    return {"inputs": inputs, "targets": int(inputs.sum() > 0)}


def samples(first, end):
    return lambda: map(sample, range(first, end))


class Streamed:
    """A task whose data are streams; in order."""

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}  # noqa: RUF012
    length: int | None = SIZE
    buffer = 0

    def numpy_model(self):
        return Mlp(inputs=4, hidden=5, outputs=2)

    def train_data(self):
        return hvdtrain.stream(samples(0, SIZE), length=self.length, shuffle_buffer=self.buffer)

    def eval_data(self):
        return hvdtrain.stream(samples(100, 100 + EVAL_SIZE))


Shuffled = type("Shuffled", (Streamed,), {"buffer": 9})


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for line in lines if (record := json.loads(line))["phase"] == "train"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"buffer": 10}, "stored in other blocks or shards"), ({"length": 60}, "on 50 samples; .* now has 60")],
)
def test_a_stream_that_is_shuffled_otherwise_or_longer_is_a_change(train, changes, said):
    train(task_class=Shuffled, batch_size=10, steps=8)
    with pytest.raises(CheckpointError, match=said):
        train(task_class=type("Other", (Shuffled,), changes), batch_size=10, steps=12, resume="auto")


@pytest.mark.parametrize("wrong", [SIZE - 10, SIZE + 10, None])
def test_a_wrong_length_is_put_right_and_the_run_goes_on(train, tmp_path, wrong):
    fields = {"batch_size": 10, "log_every": 1, "save_every": 2, "lr_schedule": "constant"}
    train(**fields, task_class=Streamed, steps=12, run_dir="whole")
    wrongly = type("Wrong", (Streamed,), {"length": wrong})
    with nullcontext() if wrong is None else pytest.raises(DataError, match="over the stream ha"):
        train(**fields, task_class=wrongly, steps=12 if wrong else 8)
    train(**fields, task_class=Streamed, steps=12, resume="auto")
    assert losses(tmp_path / "run")[-4:] == losses(tmp_path / "whole")[-4:]
