"""The option check_data: batches that are read by all workers and compared before training."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.config import Config
from hvdtrain.data.blocks import training_order
from hvdtrain.data.feed import Order
from hvdtrain.data.fingerprint import differing_keys, sample_reader
from hvdtrain.data.order import SequentialOrder
from hvdtrain.data.stream import Stream
from hvdtrain.errors import AgreementError
from hvdtrain.jobs.opening.data_identity import JobData, disagreement, hash_of, words_for
from hvdtrain.stages import replicas
from hvdtrain.training_plan import Progress, TrainingPlan, most_workers
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import Workers

_SAME_SAMPLE = (
    "__getitem__ must return the same sample at every reading. Give a random transform a generator that is "
    "seeded by the index, or augment with hvdtrain.data.Augmented."
)


def check_batches(workers: Workers, data: JobData, config: Config, progress: Progress) -> list[str]:
    """Collective. Compare all samples of the first ``check_data`` batches over the workers.

    Every worker reads the whole global batches, without augmentation, and its own part of them twice.

    Args:
        workers: the workers.
        data: the data of the job.
        config: the resolved config.
        progress: where training starts.

    Returns:
        A note for each data set that was checked; none if ``check_data`` is 0.

    Raises:
        AgreementError: on every worker alike, if a sample differs between workers or between two readings.
    """
    if not config.check_data:
        return []
    size = len(data.datasets["train_data"])
    plan = TrainingPlan.of(config, replicas(workers, config), size, progress, most=most_workers(workers))
    train_order = training_order(data.datasets["train_data"], size, config.seed)
    ranges: dict[str, tuple[Order, int, int, int]] = {
        "train_data": (train_order, progress.samples, plan.last_sample, plan.batch.global_batch)
    }
    for name, dataset in data.datasets.items():
        if name not in ranges:
            count = len(dataset)
            ranges[name] = (SequentialOrder(count), 0, count, plan.eval_batch.global_batch)
    notes = []
    for name in [name for name, dataset in data.datasets.items() if isinstance(dataset, Stream)]:
        ranges.pop(name, None)
        notes.append(
            f"check_data: the {words_for(name)} is a stream, of which only the first sample is compared"
        )
    for name, (order, first, end, batch) in ranges.items():
        last = min(end, first + config.check_data * batch)
        for start in range(first, last, batch):
            ACTIVITY.progress()
            indices = _indices(order, start, min(start + batch, last))
            _check_samples(workers, name, data.datasets[name], indices, data.skip)
        if last > first:
            samples = f"{last - first:,} samples of the {words_for(name)}"
            notes.append(f"check_data: {samples} are equal on all workers and at every reading")
    return notes


def _check_samples(workers: Workers, name: str, dataset: Any, indices: Sequence[int], skip: bool) -> None:
    """Collective. Check that samples are the same on all workers, and at every reading."""
    read = sample_reader(dataset, skip)
    own = [read(index) for index in indices]
    twice = range(workers.rank, len(indices), workers.size)
    changed = next(
        ((indices[k], keys) for k in twice if (keys := differing_keys(own[k], read(indices[k])))), None
    )
    everyone = workers.allgather_object((workers.host, changed, hash_of(own)))
    for rank, (host, found, _) in enumerate(everyone):
        if found is not None:
            index, keys = found
            raise AgreementError(
                f"every reading of sample {index} of the {words_for(name)} gives another value under "
                f"{', '.join(map(repr, keys))}: found by rank {rank} ({host})",
                _SAME_SAMPLE,
                everywhere=True,
            )
    if len({hashed for *_, hashed in everyone}) == 1:
        return
    gathered = workers.allgather_object((workers.host, own))
    for k, index in enumerate(indices):
        found = [(host, digests[k]) for host, digests in gathered]
        keys = sorted({key for _, digests in found for key in differing_keys(found[0][1], digests)})
        if keys:
            raise disagreement(name, index, keys[0], found)


def _indices(order: Order, first: int, last: int) -> list[int]:
    return [int(index) for index in order.indices(np.arange(first, last))]
