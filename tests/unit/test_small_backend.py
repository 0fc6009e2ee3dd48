"""A backend that has the twelve methods of the seam alone: what runs, and what is refused."""

import json

import pytest
from support.fakes import one_worker
from support.numpy_backend import NumpyBackend

from hvdtrain.backends.base import (
    LocalSteps,
    Probes,
    Resizable,
    TrainedParameters,
    local_steps,
    model_files,
    resizable,
)
from hvdtrain.errors import UsageError


def test_a_job_needs_neither_dry_run_nor_memory_nor_clock_nor_freezing(train, tmp_path):
    backend = NumpyBackend(one_worker())
    assert not any(isinstance(backend, kind) for kind in (Probes, TrainedParameters, LocalSteps, Resizable))
    train(epochs=3, save_every="1epoch", eval_every="1epoch")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["phase"] == "eval"][-1]
    assert last["accuracy"] > 0.8


def test_a_profile_is_refused_before_anything_is_written(train, tmp_path):
    with pytest.raises(UsageError, match="this backend does not have a dry run and measurements"):
        train(steps=4, profile="2-3")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("accessor", "lacks"),
    [(local_steps, "local SGD"), (resizable, "elastic jobs"), (model_files, "export and import")],
)
def test_other_features_are_refused_by_the_same_message(accessor, lacks):
    with pytest.raises(UsageError, match=rf"numpy .* on the CPU: this backend does not have {lacks}"):
        accessor(NumpyBackend(one_worker()))
