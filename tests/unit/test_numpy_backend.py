"""The reference backend in numpy: whole jobs through the real loop, with one worker."""

import json

import pytest

from hvdtrain import session
from hvdtrain.errors import ConfigError


def losses(folder) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for line in lines if (record := json.loads(line))["phase"] == "train"]


def test_the_numpy_backend_trains_digits_through_the_unchanged_loop(train):
    summary = train(epochs=10)
    assert summary.status == "completed"
    assert summary.final["accuracy"] >= 0.95


def test_accumulated_micro_batches_give_the_same_curve(train, tmp_path):
    train(steps=20, batch_size=32, log_every=1, run_dir="whole")
    train(steps=20, batch_size=8, accumulate=4, base_batch_size=32, log_every=1, run_dir="parts")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.parametrize("most", [3, 8])
def test_micro_batches_for_the_most_workers_give_the_same_curve(train, tmp_path, monkeypatch, most):
    """One worker of an elastic job does the micro-batches of all that there may be, the last one padded."""
    train(steps=20, global_batch_size=50, log_every=1, run_dir="fixed")
    monkeypatch.setattr(session, "most_workers", lambda workers: most)
    train(steps=20, global_batch_size=50, log_every=1, run_dir="elastic")
    assert losses(tmp_path / "elastic") == pytest.approx(losses(tmp_path / "fixed"), rel=1e-5)
    assert losses(tmp_path / "elastic") != losses(tmp_path / "fixed")  # sums of other parts


def test_a_job_that_was_stopped_continues_to_the_same_curve(train, tmp_path):
    train(steps=20, log_every=1, run_dir="whole")
    train(steps=12, log_every=1, lr_schedule="constant", warmup_epochs=0)
    whole = train(steps=20, log_every=1, lr_schedule="constant", warmup_epochs=0, run_dir="other")
    summary = train(steps=20, log_every=1, lr_schedule="constant", warmup_epochs=0, resume="auto")
    assert losses(tmp_path / "run") == losses(tmp_path / "other")
    assert summary.final == whole.final


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"compile": True}, "compile"),
        ({"sync_batch_norm": True}, "sync_batch_norm"),
        ({"ema_decay": 0.9}, "ema_decay"),
        ({"compression": "fp16"}, "compression"),
        ({"precision": "bf16"}, "precision"),
        ({"optimizer": "lamb"}, "optimizer"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"decay_norms_and_biases": False}, "decay_norms_and_biases"),
        ({"checkpoint_activations": True}, "checkpoint_activations"),
    ],
    ids=str,
)
def test_what_the_backend_cannot_do_is_refused_by_name(train, tmp_path, fields, named):
    with pytest.raises(
        ConfigError, match=rf"^{named} .*: the backend for numpy cannot do this\nLeave {named} out"
    ):
        train(steps=2, **fields)
    assert not (tmp_path / "run").exists()
