"""What more looks at a batch of the dry run show: wrong shapes, a random evaluation, data that do not fit."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.records import DryRun
from hvdtrain.data.datasets import ArrayDataset, ItemDataset
from hvdtrain.data.drawn import unordered
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.naming import HuggingFaceDataset
from hvdtrain.data.numeric import SEPARATOR, TARGETS, distance, leaves_of
from hvdtrain.data.readers import LocalFetch
from hvdtrain.data.stream import Stream
from hvdtrain.errors import HvdtrainError, TaskError

_SECONDS = 0.03
_BYTES = 1 << 25
_BLOCK, _BLOCK_BYTES = 256, 1 << 20  # that are read at once, if the data set can do so
_COMPARED = 256
_SCALES = 30  # how much larger or smaller inputs are on average that were not scaled alike


def reused_memory(dataset: Any) -> str:
    """Return what reading the first and the last sample of a data set shows of memory that is used again."""
    # It is the name of an array that is the last sample's in both places of a batch of the two, or that the
    # next reading changes. Empty if there is none, or a sample cannot be read.
    size = 0 if isinstance(dataset, Stream) else len(dataset)
    if size < 2:
        return ""
    fetch, ends = LocalFetch(dataset), np.asarray([0, size - 1])
    try:
        first, _ = fetch(ends[:1])
        kept = {name: array.copy() for name, array in first.items()}
        last = {name: array.copy() for name, array in fetch(ends[1:])[0].items()}
        changed = [name for name in kept if not _are_equal(first[name], kept[name])]
        pair, _ = fetch(ends)
        changed += [
            name
            for name, (one, other) in pair.items()
            if _are_equal(one, other) and not _are_equal(kept[name][0], last[name][0])
        ]
    except Exception:
        return ""  # it is reported when it is read for a step
    return next(iter(changed), "")


def _are_equal(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))


# relative to the norm: rounding on a GPU is far below, in half precision not so far
_ROUNDING, _HALF_ROUNDING = 1e-3, 2e-2


def find_broadcast(
    what: str, batch: HostBatch, outputs: Any, compute: Callable[[HostBatch], DryRun]
) -> HvdtrainError | None:
    """Collective. Return the error of a loss or metric that broadcasts (n, 1) with (n,) to (n, n)."""
    # It is looked for where the batch has an array, such as targets, with one number for each sample. Two
    # samples are computed together, and each input with each target alone: if the former are means over rows,
    # columns or all of the latter, they were broadcast.
    count, inputs = batch.weights.shape[1], _inputs_of(batch.arrays)
    numbers = {
        key: array[0]
        for key, array in batch.arrays.items()
        if key not in inputs and array[0].size == count and array.ndim <= 3
    }
    if not numbers or count < 2:
        return None
    values = np.stack([array.reshape(count) for array in numbers.values()], 1)
    rows = [0, max(1, int(np.argmax((values != values[0]).any(1) & (batch.weights[0] > 0))))]
    together = compute(batch.rows(rows))
    alone = [compute(_mixed(batch, i, k)) for i in rows for k in rows]
    if any(result.error is not None for result in (together, *alone)) or not batch.weights[0, rows].all():
        return None
    for name, given in together.values.items():
        table = np.asarray([result.values[name][0] for result in alone]).reshape(2, 2)
        right, means = table.diagonal(), (table.mean(1), table.mean(0), table.sum(1), table.sum(0))
        is_mean = _are_close(given, table.mean()) and not _are_close(given, right.mean())
        is_of_batch = name in together.weighted and _are_close(given, given.mean())
        is_of_all = not _are_close(given, right) and any(_are_close(given, mean) for mean in means)
        if is_mean or (is_of_all and not is_of_batch):
            value = "the loss" if name == "loss" else f"the metric {name!r}"
            of = " and ".join(str(batch.indices[0, row]) for row in rows)
            counts = {count, np.count_nonzero(batch.weights)}  # the outputs may be without padding
            leaves = [leaf for leaf in leaves_of(outputs) if leaf.ndim and len(leaf) in counts]
            shapes = [f"outputs are {leaf.shape}" for leaf in leaves]
            shapes += [f"{key!r} is {array.shape}" for key, array in numbers.items()]
            is_by_sample = _are_close(given.mean(), right.mean())  # of a model whose outputs are all alike
            of_given, of_right = (
                (", ".join(f"{number:.4g}" for number in array) if is_by_sample else f"{array.mean():.4g}")
                for array in (given, right)
            )
            own = "their own values are" if is_by_sample else "the mean of their own values is"
            return TaskError(
                f"{value} compares each sample with all others, as ({count}, 1) and ({count},) are broadcast "
                f"to ({count}, {count}): {', '.join(shapes)}. For samples {of} of the {what} it is "
                f"{of_given}; {own} {of_right}",
                "Give both the same shape: take the last axis of size 1 away, as outputs.squeeze(-1) does in "
                "PyTorch and tf.squeeze(outputs, -1) in TensorFlow. A mean over the samples is given as "
                "hvdtrain.Weighted(mean, number of samples).",
            )
    return None


def has_row_numbers(dataset: Any, batch: HostBatch) -> bool:
    """Return whether a batch may have numbers of its own rows, such as pairs that ``collate`` made."""
    # They are out of range in a batch of fewer rows, which ends a process that has a GPU.
    if isinstance(unordered(dataset), ArrayDataset | ItemDataset | HuggingFaceDataset):
        return False  # it joins samples, which know of no batch
    count = batch.weights.shape[1]
    return any(
        array.dtype.kind in "iu"
        and array.dtype.itemsize >= 4
        and array.size > 0
        and name.partition(SEPARATOR)[0] not in TARGETS
        and min(2, count - 1) <= array.max() < count  # and no mask
        for name, array in batch.arrays.items()
    )


def _mixed(batch: HostBatch, inputs: int, others: int) -> HostBatch:
    """Return a batch of one sample that has the inputs of a sample, and everything else of another."""
    one, other = batch.rows([inputs]), batch.rows([others])
    return replace(one, arrays={**other.arrays, **{k: one.arrays[k] for k in _inputs_of(one.arrays)}})


def _inputs_of(arrays: Mapping[str, Any]) -> set[str]:
    """Return the names of a batch's inputs: those named so, or else all that are not named as targets."""
    first = {name: name.partition(SEPARATOR)[0] for name in arrays}
    named = {name for name in arrays if first[name] == "inputs"}
    return named or {name for name in arrays if first[name] not in {*TARGETS, "weights"}}


def drawn_note(once: Mapping[str, NDArray[Any]], again: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """Return the note on a batch of training data that has other values when it is read again."""
    for name, array in once.items():
        if not np.array_equal(array, again.get(name, ()), equal_nan=array.dtype.kind in "fc"):
            return {
                "drawn": f"reading a batch of the training data again gives another {name!r}: the data set, "
                "collate or train_collate draws random numbers anew, so a repeated or resumed run computes "
                "something else, and so does one with another number of workers. Derive them from a sample's "
                "index or from the keys of augmented(); to mix samples, use the options mixup and cutmix"
            }
    return {}


def random_note(what: str, once: DryRun, again: DryRun, *, is_half: bool = False) -> str:
    """Return the note on a batch that is evaluated twice with different results; empty if they agree."""
    tolerance = _HALF_ROUNDING if is_half else _ROUNDING
    pairs = zip(leaves_of(once.outputs), leaves_of(again.outputs), strict=False)
    furthest = max((distance(one, other) for one, other in pairs if one.shape == other.shape), default=0.0)
    losses = [result.values["loss"] for result in (once, again) if "loss" in result.values]
    if len(losses) == 2:
        furthest = max(furthest, distance(*losses))
    if not furthest > tolerance:
        return ""
    values = f"a loss of {losses[0].mean():.4g} and of {losses[1].mean():.4g}, " if len(losses) == 2 else ""
    return (
        f"evaluating the first batch of the {what} twice gives {values}values that differ by {furthest:.1%}: "
        "the evaluation draws random numbers, as a dropout does that is left on. Pass training=self.training "
        "to functional.dropout; in Keras, do not call a layer with training=True"
    )


def scale_note(what: str, arrays: Mapping[str, NDArray[Any]], others: Mapping[str, NDArray[Any]]) -> str:
    """Return the note on inputs that are not scaled as those of the training data; empty if all are."""
    for name in sorted(_inputs_of(arrays)):
        array, other = arrays[name], others.get(name)
        if (
            other is None
            or min(array.size, other.size) < 32
            or "f" not in array.dtype.kind + other.dtype.kind
        ):
            continue  # too few, or such as numbers of words
        here, there = (float(np.abs(np.nan_to_num(a.astype(np.float64))).mean()) for a in (array, other))
        if min(here, there) > 0 and max(here, there) >= _SCALES * min(here, there):
            return (
                f"{name!r} of the {what} lies between {array.min():.4g} and {array.max():.4g}, that of the "
                f"training data between {other.min():.4g} and {other.max():.4g}, in the first batches: scale "
                "both alike"
            )
    return ""


def _are_close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=_ROUNDING, atol=1e-6))
