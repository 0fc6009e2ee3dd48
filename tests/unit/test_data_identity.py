"""Data that differ between workers, between readings, and from those of a checkpoint."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.fakes import one_worker
from support.states import make_record

from hvdtrain.config import Config
from hvdtrain.data.datasets import as_dataset
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.jobs.opening import data_identity
from hvdtrain.jobs.opening.data_identity import JobData, compare_with_job, identify_data

SIZE = 200


class Changing:
    """Samples that are other ones at every reading."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {"inputs": np.random.default_rng().normal(), "targets": index}


def values(*changed: int, size: int = SIZE) -> dict[str, np.ndarray]:
    """Return data in which some samples have another input."""
    inputs = np.arange(size, dtype=np.float32) + 1
    inputs[list(changed)] = -7
    return {"inputs": inputs, "targets": np.arange(size)}


def config(**fields) -> Config:
    return Config(**{"framework": "torch", "task": "a.py:Small", "epochs": 1, "batch_size": 8, **fields})


def test_a_note_says_that_evaluations_are_read_at_random():
    """The same for what a collate draws; augmented training data are as they should be."""
    data = {"inputs": [[1.0, 2.0]] * SIZE, "targets": np.arange(SIZE)}

    def masking(samples):
        mask = np.random.rand(len(samples), 2) < 0.5
        return {"inputs": np.stack([s["inputs"] for s in samples]) * mask, "targets": np.zeros(len(samples))}

    dataset = as_dataset(data, collate=masking)
    notes = identify_data(one_worker(), {"train_data": dataset, "eval_data": dataset}, config()).notes
    assert len(notes) == 1
    assert notes[0].startswith("reading the evaluation data draws random numbers from a global generator")


def job_data(train, evaluation=None) -> JobData:
    given = {"train_data": as_dataset(train), "eval_data": evaluation and as_dataset(evaluation)}
    return identify_data(one_worker(), given, config())


def compared(before: JobData, now: JobData, **fields) -> list[str]:
    given = {"data": dict(before.fingerprints), "config": config().model_dump(mode="json")}
    found = SimpleNamespace(path=Path("run/step-3"), manifest=make_record(3).model_copy(update=given))
    return data_identity.compare_with_checkpoint(found, now, config(**fields))


def test_changed_data_are_refused_with_causes_and_the_way_out():
    with pytest.raises(CheckpointError) as caught:
        compared(job_data(values(), values(size=9)), job_data(values(), values(3, size=9)), seed=2)
    said = "the evaluation data changed since checkpoint run/step-3 was made: sample 3 has another value"
    assert caught.value.problem.startswith(said)
    assert "another seed (0 then, 2 now)" in caught.value.remedy
    assert "--on-changed-data warn" in caught.value.remedy
    (note,) = compared(job_data(values()), job_data(values(0)), on_changed_data="warn")
    assert "may now contain samples that the model was trained on" in note
    (note,) = compared(job_data(values()), job_data(values(0)), task="b.py:Other")
    assert "The task was a.py:Small, and is b.py:Other now" in note


def test_a_worker_that_joins_has_the_data_of_the_job():
    """Numbers may differ by rounding; keys that every reading changes are not compared."""
    job = job_data(values())
    rounded = values()
    rounded["inputs"] = rounded["inputs"] * np.float32(1 + 1e-7)
    compare_with_job(job_data(rounded), job.to_keep())
    compare_with_job(job_data(Changing()), job_data(Changing()).to_keep())
    with pytest.raises(EnvironmentFault, match="'inputs' of sample 199 of the training data is not what the"):
        compare_with_job(job_data(values(199)), job.to_keep())
