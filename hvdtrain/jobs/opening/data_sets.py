"""Opening what a task's method gave: one data set, or several sets of evaluation data."""

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.config import Config
from hvdtrain.data.bad_samples import Fetch, LocalFetch
from hvdtrain.data.datasets import ArrayDataset, as_dataset, fetch, signature
from hvdtrain.data.drawn import undrawn
from hvdtrain.data.eval_sets import (
    TRAINING_DATA,
    EvalSets,
    check_not_bare_sets,
    fetch_with_name,
    name_the_set,
    set_words,
    sets_of,
)
from hvdtrain.data.fingerprint import columns_of
from hvdtrain.data.numeric import TARGETS, all_bits, merged_by_cast
from hvdtrain.data.order import order_identity
from hvdtrain.data.stream import Stream
from hvdtrain.errors import DataError
from hvdtrain.jobs.opening.data_identity import DATA, METHODS
from hvdtrain.session import Session
from hvdtrain.storage.text import counted
from hvdtrain.task import Arrays


def streams_of(train_data: Any, eval_data: Any) -> dict[str, Stream]:
    """Return the streams among a job's data, by their names in messages."""
    data = {TRAINING_DATA: train_data, **{set_words(name): one for name, one in sets_of(eval_data).items()}}
    return {words: one for words, one in data.items() if isinstance(one, Stream)}


def promises(session: Session, before: Manifest | None) -> str:
    """Return which promises hold for the training data if it is a stream; empty if it is none.

    Args:
        session: the run.
        before: of the checkpoint that the run continues from, if it does.
    """
    stream, config = session.data.training, session.config
    if not isinstance(stream, Stream):
        return ""
    workers = session.backend.workers.size
    parts = _lost_promise(stream, before, config, workers)
    parts.append("each sample once per pass if each pass over the source gives the same")
    if stream.is_dealt(workers):
        parts.append(
            f"{counted(stream.shards, 'shard')} are dealt to {workers} workers, and those whose shards end "
            "first are padded with weight 0; the curve depends on the number of workers"
        )
    elif workers > 1:
        why = f"has {counted(stream.shards, 'shard')}" if stream.shards else "cannot be divided"
        parts.append(
            f"every worker reads all of it, since it {why}, and keeps its part of each step; the order is "
            "the same with any number of workers"
        )
    buffer = stream.shuffle_buffer
    parts.append(f"shuffled within {counted(buffer, 'sample')}" if buffer else "not shuffled")
    parts.append("resumed by reading again what was consumed")
    if stream.length is None:
        cadences = {"save_every": config.save_every, "eval_every": config.eval_every}
        late = [name for name, one in cadences.items() if one is not None and one.unit == "epochs"]
        also = f": give {' and '.join(late)} in steps" if late else ""
        parts.append(f"no length declared: what is due by epochs is due at the end{also}")
    return "; ".join(parts)


def _lost_promise(stream: Stream, before: Manifest | None, config: Config, workers: int) -> list[str]:
    """Return a warning if a run continues with shards that are assigned otherwise than before."""
    if before is None or not (stream.is_dealt(before.workers) or stream.is_dealt(workers)):
        return []
    batch, last = _global_batch(config.model_dump(), workers), _global_batch(before.config, before.workers)
    if (workers, batch) == (before.workers, last):
        return []
    return [
        f"warning: resumed on {counted(workers, 'worker')} with a global batch of {batch} after "
        f"{before.workers} with {last}: of the pass that was begun, some samples may come twice, some never"
    ]


def _global_batch(config: Mapping[str, Any], workers: int) -> int:
    total = config.get("global_batch_size")
    return int(total or workers * int(config.get("batch_size") or 0) * int(config.get("accumulate") or 1))


def known_size(dataset: Any) -> int | None:
    """Return the number of samples of a data set; of a stream what was declared or counted, or None."""
    if isinstance(dataset, Stream):
        return dataset.length or dataset.seen
    return len(dataset)


def notes_on_streams(config: Config, data: Mapping[str, Any]) -> list[str]:
    """Return what to report to the user of options that have no effect on streams."""
    if config.read_workers and any(isinstance(one, Stream) for one in data.values()):
        return ["read_workers: streams are read by a thread of each worker"]
    return []


_VALUES = 1 << 21  # of an array that are compared
_READ = 256  # samples of other data
_SECONDS = 3.0


def open_sets(source: Any, collate: Any, config: Config, method: str) -> tuple[Any, dict[str, Any]]:
    """Open data and check that they can be read. Local: no collective.

    Args:
        source: what the task's method gave.
        collate: the task's function that makes batches, or None.
        config: the job's config.
        method: a key of ``DATA``; only ``eval_data`` can give several sets.

    Returns:
        The data set, or EvalSets of data sets, and what of them must be equal on all workers.

    Raises:
        DataError: If they cannot be used.
    """
    if method == "eval_data":
        check_not_bare_sets(source, collates=collate is not None)
    if method != "eval_data" or not isinstance(source, EvalSets):
        return _open_set(source, collate, config, DATA[method])
    opened, values = {}, {"names of the evaluation sets": ", ".join(source)}
    for name, one in source.items():
        opened[name], found = _open_set(one, collate, config, set_words(name), is_named=True)
        values |= found
    return EvalSets(opened), values


def _open_set(
    source: Any, collate: Any, config: Config, what: str, is_named: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Open a data set; ``what`` it is called stands in errors."""
    try:
        dataset = as_dataset(source, collate=collate)
    except Exception as error:
        name_the_set(error, what if is_named else f"{METHODS[what]}()")
        raise
    fetch: Fetch = LocalFetch(dataset, skip=config.on_bad_sample == "skip")
    if is_named:
        fetch = fetch_with_name(fetch, what)
    kinds = signature(dataset, what, lambda indices: fetch(indices, None)[0])
    values = {f"{key} of the {what}": kind for key, kind in kinds.items()}
    if order := order_identity(dataset):
        values[f"blocks of the {what}"] = order
    return dataset, {f"size of the {what}": len(dataset), **values}


def find_merged(datasets: Mapping[str, Any]) -> DataError | None:
    """Return the error of data of 64 bits of which different values become equal in the 32 bits of the model.

    Local: no collective. Workers may find different errors, as each reads samples for a few seconds only.

    Arrays in which there are none are converted then, once.

    Args:
        datasets: data sets by what messages call them.
    """
    for what, dataset in datasets.items():
        with all_bits():
            arrays = _wide_arrays(dataset)
        for name, array in arrays.items():
            if name == "weights" or not array.size or (found := merged_by_cast(array)) is None:
                continue
            column, one, other = found
            place = f"column {column} of {name!r}" if array[0].size > 1 else repr(name)
            merged = f"{one!r} becomes infinite" if np.isinf(other) else f"{one!r} and {other!r} become equal"
            return DataError(
                f"{place} of the {what} has numbers of 64 bits, and the model has 32: {merged}",
                "Subtract their mean or number them from 0 in the task; or give the model 64 bits, with "
                ".double() in PyTorch and dtype='float64' in Keras; or, if the difference does not matter, "
                "convert them to float32.",
            )
        if isinstance(kept := undrawn(dataset), ArrayDataset):
            kept.narrow()
    return None


def align_columns(
    datasets: Mapping[str, Any], expected: Mapping[str, Sequence[str]], whose: str
) -> list[str]:
    """Put the columns of tables in the order in which the model is given them. Local: no collective.

    Args:
        datasets: data sets by what messages call them, equal on all workers.
        expected: the columns of arrays, in order.
        whose: whose columns these are.

    Returns:
        Notes for the user.

    Raises:
        DataError: If a table has other columns.
    """
    notes = []
    for what, dataset in datasets.items():
        for name, own in columns_of(dataset).items():
            wanted = list(expected.get(name, own))
            if own == wanted:
                continue
            differences = [
                f"{words} {', '.join(map(repr, columns[:8]))}{', ...' if len(columns) > 8 else ''}"
                for words, columns in (
                    ("not", [column for column in wanted if column not in own]),
                    ("but", [column for column in own if column not in wanted]),
                )
                if columns
            ]
            if differences:
                problem = f"{name!r} of the {what} has other columns than that of {whose}"
                raise DataError(
                    f"{problem}: {', '.join(differences)}",
                    "Give both the same columns; their order does not matter.",
                    everywhere=True,
                )
            dataset.reorder(name, wanted)
            notes.append(f"{what}: the columns of {name!r} are put in the order of {whose}, by their names")
    return notes


def roles_of(names: Collection[str], is_named: bool) -> str:
    """Return what columns are used for that a user may not have meant, for the plan; empty if none is.

    Args:
        names: the names in a batch.
        is_named: whether the loss has a name, so that it uses targets and weights.
    """
    targets = [name for name in TARGETS if name in names]
    parts = [f"the loss compares with {targets[0]!r}, not {targets[1]!r}"] if len(targets) > 1 else []
    parts += ["'weights' weighs the samples in the loss"] if "weights" in names else []
    return "; ".join(parts) if is_named else ""


def _wide_arrays(dataset: Any) -> Arrays:
    """Return the floating-point numbers of 64 bits of a data set, or of its first samples."""
    dataset = undrawn(dataset)
    if isinstance(dataset, ArrayDataset):
        found = {name: a[: max(2, _VALUES * len(a) // max(1, a.size))] for name, a in dataset.arrays.items()}
    else:
        try:
            found = fetch(dataset, np.zeros(1, np.int64))
            if any(map(_is_wide, found.values())):
                found = _first_samples(dataset)
        except Exception:
            return {}  # it is reported when training reads it
    return {name: array for name, array in found.items() if _is_wide(array)}


def _first_samples(dataset: Any) -> Arrays:
    """Return the first samples of a data set, fewer if they take long to read."""
    if isinstance(dataset, Stream):
        items = islice(dataset.items(0, 0, None, shuffles=False), _READ)
        return dataset.batch_of([dataset.decoded(item) for item in items])
    parts, deadline = [], time.monotonic() + _SECONDS
    for first in range(0, min(_READ, len(dataset)), 16):
        parts.append(fetch(dataset, np.arange(first, min(first + 16, len(dataset)))))
        if time.monotonic() > deadline:
            break
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _is_wide(array: Any) -> bool:
    return bool(array.dtype.kind == "f" and array.dtype.itemsize == 8)
