"""Whether all workers have the same data, and whether they are those of a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from hvdtrain.agreement import Workers
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config
from hvdtrain.data.feed import Order
from hvdtrain.data.fingerprint import (
    Fingerprint,
    SampleDigests,
    changing_keys,
    differing_keys,
    digests_at,
    first_difference,
    is_same,
    sample_reader,
    take_fingerprint,
)
from hvdtrain.data.order import SequentialOrder, ShuffledOrder
from hvdtrain.errors import AgreementError, CheckpointError
from hvdtrain.jobs.resume import same_task
from hvdtrain.training_plan import Progress, TrainingPlan

DATA = {"train_data": "training data", "eval_data": "evaluation data"}  # by the task's method

SAME_DATA = (
    "Every worker needs the whole data set, in the same order. Do not shard it: hvdtrain shards the data "
    "itself. Seed a random split or order, such as train_test_split(..., random_state=0), and sort file "
    "names and sets."
)
_SAME_SAMPLE = (
    "__getitem__ must return the same sample at every reading. Give a random transform a generator that is "
    "seeded by the index, or augment with hvdtrain.data.Augmented."
)


@dataclass(frozen=True)
class JobData:
    """The data of a job with their fingerprints.

    Attributes:
        datasets: the data sets, by the task's method.
        fingerprints: the fingerprint of each.
        skip: whether the next readable sample replaces one that cannot be read.
        notes: what to tell the user.
    """

    datasets: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    skip: bool = False
    notes: tuple[str, ...] = ()


NO_DATA = JobData()

# host of a worker and what it found, in the order of ranks
_Gathered = Sequence[tuple[str, Any]]


def identify_data(workers: Workers, datasets: Mapping[str, Any], config: Config) -> JobData:
    """Collective. Take the fingerprints of the data, and check that they are equal on all workers.

    Keys whose values change with every reading are not compared. They are looked for only if fingerprints
    differ: another reading takes time.

    Args:
        workers: the workers.
        datasets: the data sets, of equal size on all workers, by the task's method; None for no data.
        config: the resolved config.

    Raises:
        AgreementError: on every worker alike, with the first sample that differs.
    """
    skip = config.on_bad_sample == "skip"
    given = {method: dataset for method, dataset in datasets.items() if dataset is not None}
    own = {method: take_fingerprint(dataset, skip) for method, dataset in given.items()}
    job_data = JobData(given, own, skip)
    if len(set(workers.allgather_object(_hashed(sorted(own.items()))))) == 1:
        return job_data
    everyone = workers.allgather_object((workers.host, own))
    if not any(_first_difference(everyone, method) for method in own):
        return job_data
    changing = {method: changing_keys(given[method], own[method], skip) for method in own}
    all_changing = [keys for _, keys in workers.allgather_object((workers.host, changing))]
    notes = []
    for method in own:
        keys = sorted(set().union(*(found[method] for found in all_changing)))
        notes += [_changes_note(method, keys)] if keys else []
        difference = _first_difference(everyone, method, keys)
        if difference is not None:
            index, key = difference
            found = [(host, digests_at(prints[method], index)) for host, prints in everyone]
            raise _disagreement(method, index, key, found)
    return JobData(given, own, skip, tuple(notes))


def compare_with_checkpoint(found: Checkpoint, data: JobData, config: Config) -> list[str]:
    """Check that the data are those that a checkpoint was trained and evaluated on. Local: no collective.

    Args:
        found: the checkpoint. One of an older version has no fingerprints, and nothing is compared.
        data: the data of this job.
        config: the resolved config.

    Returns:
        Notes for the user.

    Raises:
        CheckpointError: If the data changed, although the task and its options are the checkpoint's, and
            ``on_changed_data`` is stop.
    """
    notes: list[str] = []
    for method, before in found.manifest.data.items():
        if (now := data.fingerprints.get(method)) is None:
            continue
        change = _change(method, before, now, data, notes)
        if not change:
            continue
        problem = f"the {DATA[method]} changed since checkpoint {found.path} was made: {change}"
        leak = "The evaluation data may now contain samples that the model was trained on."
        trained_with = found.manifest.config
        if not same_task(str(trained_with.get("task")), config.task):
            notes.append(f"{problem}. The task was {trained_with.get('task')}, and is {config.task} now.")
        elif trained_with.get("task_options") != config.model_dump(mode="json")["task_options"]:
            notes.append(f"{problem}. task_options are not the checkpoint's. {leak}")
        elif config.on_changed_data == "warn":
            notes.append(f"{problem}. {leak}")
        else:
            remedy = _changed_remedy(trained_with.get("seed"), config.seed)
            raise CheckpointError(f"{problem}. {leak}", remedy)
    return notes


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
    plan = TrainingPlan.of(config, workers.size, size, progress)
    train_order = ShuffledOrder(size, config.seed)
    ranges: dict[str, tuple[Order, int, int, int]] = {
        "train_data": (train_order, progress.samples, plan.last_sample, plan.batch.global_batch)
    }
    if (eval_data := data.datasets.get("eval_data")) is not None:
        count = len(eval_data)
        ranges["eval_data"] = (SequentialOrder(count), 0, count, plan.eval_batch.global_batch)
    notes = []
    for method, (order, first, end, batch) in ranges.items():
        last = min(end, first + config.check_data * batch)
        for start in range(first, last, batch):
            indices = _indices(order, start, min(start + batch, last))
            _check_samples(workers, method, data.datasets[method], indices, data.skip)
        notes.append(
            f"check_data: {max(0, last - first):,} samples of the {DATA[method]} are equal "
            f"on all workers and at every reading"
        )
    return notes


def _check_samples(workers: Workers, method: str, dataset: Any, indices: Sequence[int], skip: bool) -> None:
    """Collective. Check that samples are the same on all workers, and at every reading."""
    read = sample_reader(dataset, skip)
    own = [read(index) for index in indices]
    twice = range(workers.rank, len(indices), workers.size)
    changed = next(
        ((indices[k], keys) for k in twice if (keys := differing_keys(own[k], read(indices[k])))), None
    )
    everyone = workers.allgather_object((workers.host, changed, _hashed(own)))
    for rank, (host, found, _) in enumerate(everyone):
        if found is not None:
            index, keys = found
            raise AgreementError(
                f"sample {index} of the {DATA[method]} changes with every reading under "
                f"{', '.join(map(repr, keys))}, as rank {rank} ({host}) found",
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
            raise _disagreement(method, index, keys[0], found)


def _first_difference(
    everyone: _Gathered, method: str, ignored: Sequence[str] = ()
) -> tuple[int, str] | None:
    """Return index and key of the first sample of which a worker has another value than rank 0."""
    first = everyone[0][1][method]
    found = [first_difference(first, prints[method], ignored) for _, prints in everyone[1:]]
    return min((difference for difference in found if difference is not None), default=None)


def _disagreement(
    method: str, index: int, key: str, found: Sequence[tuple[str, SampleDigests]]
) -> AgreementError:
    """Return the error that says which workers have which value of a sample."""
    groups: list[tuple[str, list[str]]] = []  # a digest, and who has it
    for rank, (host, digests) in enumerate(found):
        if digests is None or key not in digests:
            continue
        members = next((names for known, names in groups if is_same(known, digests[key])), None)
        if members is None:
            groups.append((digests[key], members := []))
        members.append(f"rank {rank} ({host})")
    parts = [_counted(members) for _, members in groups]
    return AgreementError(
        f"the workers disagree before training:\n  sample {index} of the {DATA[method]} differs under "
        f"{key!r}: one value on " + ", another on ".join(parts),
        SAME_DATA,
        everywhere=True,
    )


def _counted(members: Sequence[str]) -> str:
    return members[0] + (f" and {len(members) - 1} more" if len(members) > 1 else "")


def _change(method: str, before: Fingerprint, now: Fingerprint, data: JobData, notes: list[str]) -> str:
    """Return how data differ from those of a checkpoint; empty if they do not."""
    if before.size != now.size:
        return f"{before.size:,} samples then, {now.size:,} now"
    if first_difference(before, now) is None:
        return ""
    changing = sorted(changing_keys(data.datasets[method], now, data.skip))
    if changing and (note := _changes_note(method, changing)) not in data.notes:
        notes.append(note)
    difference = first_difference(before, now, changing)
    return f"sample {difference[0]} has another value under {difference[1]!r}" if difference else ""


def _changes_note(method: str, keys: Sequence[str]) -> str:
    names = ", ".join(map(repr, keys))
    return f"{names} of the {DATA[method]} changes with every reading, so it is not compared"


def _changed_remedy(seed_before: Any, seed: int) -> str:
    causes = "a split or an order that is random without a seed, the order of a set, changed files"
    if seed_before != seed:
        causes += f", another seed ({seed_before} then, {seed} now)"
    return (
        f"Usual causes: {causes}. Give the task the data that it had. "
        "If the change is intended: --on-changed-data warn."
    )


def _hashed(value: Any) -> bytes:
    return blake2b(repr(value).encode(), digest_size=16).digest()


def _indices(order: Order, first: int, last: int) -> list[int]:
    return [int(index) for index in order.indices(np.arange(first, last))]
