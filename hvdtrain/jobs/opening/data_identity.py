"""Whether all workers have the same data, and whether they are those of a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config
from hvdtrain.data.eval_sets import EVALUATION_DATA, TRAINING_DATA, set_words, sets_of
from hvdtrain.data.fingerprint import (
    Fingerprint,
    SampleDigests,
    changing_keys,
    digests_at,
    draws_random_numbers,
    first_difference,
    is_same,
    take_fingerprint,
)
from hvdtrain.data.stream import Stream, number_words, samples_words
from hvdtrain.errors import AgreementError, CheckpointError, EnvironmentFault
from hvdtrain.jobs.run_directory.provenance import PATH_OPTIONS
from hvdtrain.storage.text import some
from hvdtrain.workers.agreement import Workers


def same_task(one: str, other: str) -> bool:
    """Return whether two tasks have one name, wherever they lie."""
    return _short(one) == _short(other)


def _short(task: str) -> str:
    """Return a task's name without the folder or package that it lies in."""
    place, _, name = task.rpartition(":")
    return f"{Path(place.removesuffix('.py').replace('.', '/')).name}:{name}"


def same_field(name: str, found: Checkpoint, now: Mapping[str, Any]) -> bool:
    """Return whether a field of a checkpoint's config means the same in a job started in this folder."""
    # config.yaml has whole paths, and the checkpoint those that were typed: their last parts are compared
    before, one, other = found.manifest.config, found.manifest.config.get(name), now.get(name)
    if name == "task":
        return same_task(str(one), str(other))
    if name == "task_options" and ":" not in str(before.get("task")):
        one, other = (
            {key: Path(str(value)).name if key in PATH_OPTIONS else value for key, value in given.items()}
            for given in (one if isinstance(one, Mapping) else {}, other or {})
        )
    return bool(one == other)


_EVAL = "eval_data"
# by the task's method
DATA = {"train_data": TRAINING_DATA, _EVAL: EVALUATION_DATA, "predict_data": "data to predict"}

METHODS = {words: method for method, words in DATA.items()}

SAME_DATA = (
    "Every worker needs the whole data set, in the same order. Do not shard it: hvdtrain shards the data "
    "itself. Seed a random split or order, such as train_test_split(..., random_state=0), and sort file "
    "names and sets."
)


@dataclass(frozen=True)
class JobData:
    """The data of a job with their fingerprints."""

    datasets: Mapping[str, Any] = field(default_factory=dict)  # the data sets, by the keys of ``keyed``
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)  # the fingerprint of each
    skip: bool = False  # whether the next readable sample replaces one that cannot be read
    notes: tuple[str, ...] = ()  # what to report to the user

    def kept_as(self, key: str) -> str:
        """Return the name by which a checkpoint knows a data set."""
        # The first evaluation set has none of its own: its metrics have plain names, whatever it is called.
        sets = [name for name in self.datasets if name.partition("/")[0] == _EVAL]
        return _EVAL if sets and key == sets[0] else key

    def to_keep(self) -> dict[str, Fingerprint]:
        """Return the fingerprints by the names of a checkpoint."""
        return {self.kept_as(key): fingerprint for key, fingerprint in self.fingerprints.items()}


def keyed(method: str, data: Any) -> dict[str, Any]:
    """Return what a task's method gave as data sets by key: the method, with the name of a set after it."""
    return {f"{method}/{name}" if name else method: dataset for name, dataset in sets_of(data).items()}


def words_for(key: str) -> str:
    """Return what messages call a data set, by its key."""
    method, _, name = key.partition("/")
    return set_words(name) if name else DATA[method]


NO_DATA = JobData()


def identify_data(workers: Workers, datasets: Mapping[str, Any], config: Config) -> JobData:
    """Collective. Take the fingerprints of the data, and check that they are equal on all workers."""
    # Keys whose values change with every reading are not compared, if fingerprints differ.
    skip = config.on_bad_sample == "skip"
    given = {key: one for method, data in datasets.items() for key, one in keyed(method, data).items()}
    own = {key: take_fingerprint(dataset, skip) for key, dataset in given.items()}
    notes = [
        f"reading the {words_for(key)} draws random numbers from a global generator, as random transforms "
        "and masks do: one model has other results at every reading. Leave this out, or seed it by the index"
        for key in given
        if key != "train_data" and draws_random_numbers(given[key])
    ]
    return agree_on_data(workers, JobData(given, own, skip, tuple(notes)))


def agree_on_data(workers: Workers, data: JobData) -> JobData:
    """Collective. Check that the data's fingerprints are equal on all workers; return them with notes."""
    own, notes = data.fingerprints, list(data.notes)
    digest = blake2b(repr(sorted(own.items())).encode(), digest_size=16).digest()
    if len(set(workers.allgather_object(digest))) == 1:
        return data
    everyone: list[tuple[str, Mapping[str, Fingerprint]]] = workers.allgather_object((workers.host, own))

    def differs(name: str, ignored: Sequence[str] = ()) -> tuple[int, str] | None:
        """Return index and key of the first sample of which a worker has another value than rank 0."""
        found = [first_difference(everyone[0][1][name], one[name], ignored) for _, one in everyone[1:]]
        return min(filter(None, found), default=None)

    if not any(map(differs, own)):
        return data
    changing = {name: changing_keys(data.datasets[name], own[name], data.skip) for name in own}
    of_all = workers.allgather_object(changing)
    for name in own:
        keys = sorted(set().union(*(found[name] for found in of_all)))
        notes += [_changes_note(name, keys)] if keys else []
        if (difference := differs(name, keys)) is not None:
            index, key = difference
            raise disagreement(
                name, index, key, [(host, digests_at(one[name], index)) for host, one in everyone]
            )
    return replace(data, notes=tuple(notes))


def compare_with_job(data: JobData, fingerprints: Mapping[str, Fingerprint]) -> None:
    """Check that the data are those that the workers of an elastic job train on. Local: no collective."""
    for name, own in data.fingerprints.items():
        others, what = fingerprints.get(data.kept_as(name)), ""
        if others is not None and name == "train_data" and own.order != others.order:
            what = "the order"
        elif others is not None and own.size == others.size and (found := first_difference(others, own)):
            index, key = found
            if key not in changing_keys(data.datasets[name], own, data.skip):
                what = f"{key!r} of sample {index}"
        if what:
            raise EnvironmentFault(
                f"{what} of the {words_for(name)} is not what the job trains on", SAME_DATA
            )


def compare_with_checkpoint(found: Checkpoint, data: JobData, config: Config) -> list[str]:
    """Check that the data are those that a checkpoint was trained and evaluated on; return notes. Local."""
    notes: list[str] = []
    for key, now in data.fingerprints.items():
        if (before := found.manifest.data.get(data.kept_as(key))) is None:
            continue
        for array, columns in now.columns.items():
            if columns != (were := before.columns.get(array, columns)):
                raise CheckpointError(
                    f"the model of checkpoint {found.path} takes the columns {', '.join(were)} of {array!r}; "
                    f"those of the {words_for(key)} are {', '.join(columns)}",
                    "Give the columns that it takes, in their order.",
                )
        change = _change(key, before, now, data, notes)
        if not change:
            continue
        problem = f"the {words_for(key)} changed since checkpoint {found.path} was made: {change}"
        leak = "The evaluation data may now contain samples that the model was trained on."
        trained_with = found.manifest.config
        if not same_task(str(trained_with.get("task")), config.task):
            notes.append(f"{problem}. The task was {trained_with.get('task')}, and is {config.task} now.")
        elif not same_field("task_options", found, config.model_dump(mode="json")):
            notes.append(f"{problem}. task_options are not the checkpoint's. {leak}")
        elif config.on_changed_data == "warn":
            notes.append(f"{problem}. {leak}")
        else:
            seed = trained_with.get("seed")
            another = f", another seed ({seed} then, {config.seed} now)" if seed != config.seed else ""
            raise CheckpointError(
                f"{problem}. {leak}",
                "Usual causes: a split or an order that is random and has no seed or is drawn outside the "
                "task's constructor, the order of a set (horovodrun sets PYTHONHASHSEED=0 for its workers), "
                f"changed files, another collate or padding{another}. Give the task the data that it had. "
                "If the change is intended: --on-changed-data warn.",
            )
    return notes


def is_changed(before: Mapping[str, Fingerprint], data: JobData) -> bool:
    """Return whether data may differ from those with the fingerprints that a checkpoint keeps."""
    pairs = [(before[name], now) for name, now in data.to_keep().items() if name in before]
    return any(
        one.size != now.size or one.order != now.order or first_difference(one, now) is not None
        for one, now in pairs
    )


def disagreement(
    name: str, index: int, key: str, found: Sequence[tuple[str, SampleDigests]]
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
    parts = [some(members, 1) for _, members in groups]
    return AgreementError(
        f"the workers disagree before training:\n  sample {index} of the {words_for(name)} differs under "
        f"{key!r}: one value on " + ", another on ".join(parts),
        SAME_DATA,
        everywhere=True,
    )


def _change(name: str, before: Fingerprint, now: Fingerprint, data: JobData, notes: list[str]) -> str:
    """Return how data differ from those of a checkpoint; empty if they do not."""
    if name == "train_data" and isinstance(data.datasets[name], Stream):
        before, now = before.of_first_sample(), now.of_first_sample()  # a wrong length may be put right
    if before.size != now.size:
        return f"{samples_words(before.size)} then, {number_words(now.size)} now"
    if before.order != now.order and name == "train_data":
        return (
            "its samples are stored in other blocks or shards, others are shuffled together, or "
            "sample_probabilities() or sample_lengths() are others, so the order of training is another"
        )
    if first_difference(before, now) is None:
        return ""
    changing = sorted(changing_keys(data.datasets[name], now, data.skip))
    if changing and (note := _changes_note(name, changing)) not in data.notes:
        notes.append(note)
    difference = first_difference(before, now, changing)
    return f"sample {difference[0]} has another value under {difference[1]!r}" if difference else ""


def _changes_note(name: str, keys: Sequence[str]) -> str:
    names = ", ".join(map(repr, keys))
    return f"every reading of the {words_for(name)} gives other values under {names}, which are not compared"
