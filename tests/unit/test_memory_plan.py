"""The memory that a job is said to need and has had, and the error of one that runs out of it."""

from dataclasses import replace

import pytest
from support.fakes import FakeBackend, one_worker

from hvdtrain.backends.memory import MEBIBYTE, memory_plan
from hvdtrain.config import Config
from hvdtrain.errors import LackOfMemoryError
from hvdtrain.jobs.failures import lack_of_memory
from hvdtrain.jobs.opening import dry_run
from hvdtrain.jobs.opening.dry_run import notes_on_memory

SHAPES = {"model/a/kernel": (1024, 256), "model/a/bias": (256,), "model/b/kernel": (256, 16)}
NUMBERS = 1024 * 256 + 256 + 256 * 16


def plan(workers=1, **fields):
    config = Config(**{"framework": "torch", "optimizer": "adamw", **fields})
    return memory_plan(SHAPES, config, micro_batch=16, workers=workers)


@pytest.mark.parametrize(
    ("fields", "copies"),
    [
        ({"optimizer": "sgd", "momentum": 0.9}, 3),
        ({}, 4),
        ({"optimizer": "lars", "momentum": 0.9}, 3),
        ({"ema_decay": 0.99}, 5),
        ({"compression": "fp16"}, 4.5),
        ({"compression": "powersgd:4"}, 5),
        ({"workers": 4, "shard": "optimizer"}, 2 + 2 / 4),  # sharded state counts once over all workers
        ({"workers": 4, "shard": "gradients"}, 1 + 3 / 4),
        ({"workers": 4, "shard": "gradients", "ema_decay": 0.9}, 1 + 4 / 4),
        ({"workers": 4, "shard": "optimizer", "framework": "tf"}, 2 + 3 / 4),
    ],
)
def test_each_copy_of_the_parameters_is_counted(fields, copies):
    assert plan(**fields).total_bytes == pytest.approx(4 * NUMBERS * copies, rel=1e-4 * ("shard" in fields))


def test_sharding_is_advised_where_it_saves():
    def advised(workers=4, **fields):
        remedies = plan(workers, **fields).remedies
        return [text.split(":")[0] for text in remedies if text.startswith("--shard")]

    assert advised() == ["--shard optimizer", "--shard gradients"]
    assert advised(shard="optimizer") == ["--shard gradients"]
    assert advised(shard="gradients") == advised(workers=1) == advised(sync_every=4) == []
    assert advised(compression="powersgd:4") == advised(framework="tf") == ["--shard optimizer"]
    assert advised(optimizer="lamb") == []


def test_only_what_the_job_does_not_do_is_advised():
    assert any("--batch-size 8 --accumulate 2" in text for text in plan().remedies)
    text = " ".join(plan(checkpoint_activations=True, precision="bf16").remedies)
    assert "--checkpoint-activations" not in text
    assert "--precision" not in text
    assert not any("--batch-size" in text for text in plan(global_batch_size=32).remedies)


def test_an_error_of_memory_names_what_is_large_and_what_helps():
    error = lack_of_memory(MemoryError("no room"), "training failed at step 3", plan())
    assert isinstance(error, LackOfMemoryError)
    assert error.problem.startswith("training failed at step 3, out of memory: MemoryError: no room")
    assert "model/a/kernel (1.0 MiB)" in error.remedy
    assert "--checkpoint-activations" in error.remedy
    assert lack_of_memory(ValueError("a wrong shape"), "training failed", None) is None


def test_what_a_worker_has_had_counts_where_it_is_more_and_is_compared_with_the_limit(monkeypatch):
    backend = FakeBackend(one_worker())
    tried = replace(plan(), taken=300 * MEBIBYTE)
    assert tried.total_bytes == 300 * MEBIBYTE
    assert "300 MiB were taken until now" in tried.describe()
    assert "besides activations" in plan().describe()
    monkeypatch.setattr(dry_run, "limit_bytes", lambda workers: 200 * MEBIBYTE)
    assert notes_on_memory(plan(), backend) == []
    (note,) = notes_on_memory(tried, backend)
    assert note.startswith("the job needs at least 300 MiB per worker, and each worker of this host may")
    assert "--batch-size 8 --accumulate 2" in note
