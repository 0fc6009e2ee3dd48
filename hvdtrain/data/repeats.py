"""Samples that come twice: from a buffer that is used again, or in two data sets."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvdtrain.data.bad_samples import LocalFetch
from hvdtrain.data.stream import Stream

_SECONDS = 0.03
_BYTES = 1 << 25
_BLOCK, _BLOCK_BYTES = 256, 1 << 20  # that are read at once, if the data set can do so
_COMPARED = 256


def reused_memory(dataset: Any) -> str:
    """Return what reading the first and the last sample of a data set shows of memory that is used again.

    It is the name of an array that is the last sample's in both places of a batch of the two, or that the
    next reading changes. Empty if there is none, or a sample cannot be read.
    """
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


def shared_samples(train: Any, other: Any) -> tuple[int, int]:
    """Return how many samples of a data set are in the training data as well, and how many were looked for.

    Not all are read: as many as a moment suffices for, from both ends first. Where samples of the training
    data are often equal to each other, as few distinct ones are, nothing is looked for.
    """
    if isinstance(train, Stream) or isinstance(other, Stream):
        return 0, 0
    begun = time.perf_counter()
    try:
        names = sorted(set(_read(train, np.zeros(1, np.int64))) & set(_read(other, np.zeros(1, np.int64))))
        wanted = list(_hashes(other, names, begun + _SECONDS / 3, _COMPARED))
        known = list(_hashes(train, names, begun + _SECONDS))
    except Exception:
        return 0, 0  # it is reported when it is read for a step
    distinct = set(known)
    if not names or 2 * len(distinct) < len(known):
        return 0, 0
    return sum(one in distinct for one in wanted), len(wanted)


def _hashes(dataset: Any, names: list[str], deadline: float, most: int | None = None) -> Iterator[int]:
    """Yield hashes of samples, blocks of the beginning and the end in turn, until the time is over."""
    size, taken = len(dataset), 0
    one = sum(array.nbytes for array in _read(dataset, np.zeros(1, np.int64)).values())
    block = min(_BLOCK, max(1, _BLOCK_BYTES // max(1, one))) if hasattr(dataset, "batch") else 1
    starts = [start for pair in zip(*_from_both_ends(range(0, size, block)), strict=False) for start in pair]
    for start in list(dict.fromkeys(starts))[: most and -(-most // block)]:
        arrays = _read(dataset, np.arange(start, min(start + block, size)))
        rows = [np.ascontiguousarray(arrays[name]) for name in names]
        yield from (hash(tuple(row[i].tobytes() for row in rows)) for i in range(len(rows[0]) if rows else 0))
        taken += sum(row.nbytes for row in rows)
        if time.perf_counter() > deadline or taken > _BYTES:
            return


def _from_both_ends(starts: range) -> tuple[range, range]:
    return starts, starts[::-1]


def _read(dataset: Any, indices: Any) -> Any:
    return LocalFetch(dataset)(indices)[0]


def _are_equal(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
