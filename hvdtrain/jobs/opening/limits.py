"""Batches and lengths that cannot be meant: they would keep a job busy, or out of memory, without a word."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil

from hvdtrain.config import Config
from hvdtrain.data.bad_samples import LocalFetch
from hvdtrain.data.eval_sets import set_words, sets_of
from hvdtrain.errors import ConfigError
from hvdtrain.training_plan import TrainingPlan

_MOST_PASSES = 1000  # over the data in one batch
_ALWAYS_ALLOWED = 65_536  # samples in a batch, however small the data are
_MEASURED_FROM = 1024  # samples of a worker; smaller batches fit into every host's memory
_MAX_POSITION = 2**62  # positions in the stream of samples are 64-bit integers


def check_training_length(config: Config, plan: TrainingPlan) -> None:
    """Check that the samples of the whole training can be counted.

    Raises:
        ConfigError: on every worker alike, if they cannot.
    """
    if plan.last_sample >= _MAX_POSITION:
        field = "epochs" if config.steps is None else "steps"
        raise ConfigError(
            f"{field}: {getattr(config, field):,} {field} would be {plan.last_sample:,} samples in "
            f"{plan.steps:,} steps; at most {_MAX_POSITION:,} samples can be counted",
            f"Lower {field}, or the batch size.",
            everywhere=True,
        )


def check_train_batch(config: Config, plan: TrainingPlan, dataset: Any, workers_here: int) -> None:
    """Check that a global batch of training is in proportion to the data and fits into memory.

    Args:
        config: the resolved config.
        plan: what follows from it.
        dataset: the training data.
        workers_here: workers on this host.

    Raises:
        ConfigError: If it is not; its size is checked on every worker alike, the memory on each host.
    """
    field = "global_batch_size" if config.global_batch_size else "batch_size"
    _check_size(field, plan.batch.global_batch, len(dataset), "training data")
    _check_memory(field, plan.batch.micro_batch, dataset, workers_here, config)


def check_eval_batch(config: Config, plan: TrainingPlan, eval_data: Any, workers_here: int) -> None:
    """Check the same of a batch of evaluation, for each set; only a given size is compared with the data."""
    for name, dataset in sets_of(eval_data).items():
        if config.eval_batch_size is not None:
            _check_size("eval_batch_size", plan.eval_batch.global_batch, len(dataset), set_words(name))
        _check_memory("eval_batch_size", plan.eval_batch.micro_batch, dataset, workers_here, config)


def _check_size(field: str, global_batch: int, data_size: int, what: str) -> None:
    most = max(_MOST_PASSES * data_size, _ALWAYS_ALLOWED)
    if global_batch > most:
        raise ConfigError(
            f"{field}: a batch of all workers has {global_batch:,} samples, which is "
            f"{global_batch / data_size:,.0f} times the {what} (size {data_size:,}); "
            f"at most {most:,} are allowed",
            f"Lower {field}: such a batch holds each sample many times, or padding.",
            everywhere=True,
        )


def _check_memory(field: str, samples: int, dataset: Any, workers_here: int, config: Config) -> None:
    """Check that the batches of this host's workers fit into its memory, one batch each."""
    if samples < _MEASURED_FROM:
        return
    arrays, _ = LocalFetch(dataset, skip=config.on_bad_sample == "skip")(np.zeros(1, np.int64))
    sample_bytes = _size_of(arrays)
    memory_bytes = psutil.virtual_memory().total
    if samples * sample_bytes * workers_here > memory_bytes:
        raise ConfigError(
            f"{field}: a batch of {samples:,} samples of {sample_bytes:,} bytes takes "
            f"{samples * sample_bytes / 1e9:,.1f} GB in each worker; this host has {workers_here} of them "
            f"and {memory_bytes / 1e9:,.1f} GB of memory",
            f"Lower {field}; accumulate makes a large batch of small ones.",
        )


def _size_of(arrays: Any) -> int:
    """Return the bytes of arrays, which may be nested."""
    if isinstance(arrays, Mapping):
        return sum(_size_of(part) for part in arrays.values())
    if isinstance(arrays, list | tuple):
        return sum(_size_of(part) for part in arrays)
    return int(getattr(arrays, "nbytes", 0))
