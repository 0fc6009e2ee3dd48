"""The states of metrics on several workers become one, on rank 0."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.stateful_metrics import Part
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers

_CHUNK_BYTES = 1 << 26  # rows of one worker that travel at once
_OF_ROWS = {"max": np.max, "min": np.min}

Parts = Mapping[str, Mapping[str, Part]]


class Collectives(Protocol):
    """How a framework's binding of Horovod moves the states of metrics."""

    def sum(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """Collective. Return the sum of the workers' vectors."""
        ...

    def gather(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Collective. Return the workers' bytes in the order of ranks on rank 0, and none on others."""
        ...


def merge(parts: Parts, workers: Workers, collectives: Collectives) -> dict[str, dict[str, NDArray[Any]]]:
    """Collective. Return the merged states on rank 0, by metric and name; something else on others.

    Raises:
        TaskError: on every worker alike, if the workers' states differ in names or shapes.
    """
    flat = [(metric, key, part) for metric, own in parts.items() for key, part in own.items()]
    merged: dict[str, dict[str, NDArray[Any]]] = {metric: {} for metric in parts}
    counts = _agreed_counts(flat, workers)
    summed = [np.asarray(part.array, np.float64) for _, _, part in flat if part.reduction == "sum"]
    if workers.size > 1 and summed:
        summed = _summed(summed, collectives)
    small = [part.array for _, _, part in flat if part.reduction in ("stack", *_OF_ROWS)]
    everyone = workers.allgather_object(small) if small else []
    stacked = iter([np.stack(of_all) for of_all in zip(*everyone, strict=True)] if small else ())
    sums, positions = iter(summed), _Positions(workers, collectives)
    for (metric, key, part), count in zip(flat, counts, strict=True):
        if part.reduction == "sum":
            merged[metric][key] = next(sums)
        elif part.reduction == "gather":
            merged[metric][key] = positions.gathered(part, count)
        else:
            of_workers = next(stacked)
            reduce = _OF_ROWS.get(part.reduction)
            merged[metric][key] = of_workers if reduce is None else reduce(of_workers, axis=0)
    return merged


def merge_alone(parts: Parts) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the states of this worker as if there were no other. Local: no collective."""
    return {
        metric: {
            key: _in_order(part) if part.reduction == "gather" else part.array[None]
            if part.reduction == "stack" else part.array
            for key, part in own.items()
        }
        for metric, own in parts.items()
    }  # fmt: skip


def _in_order(part: Part) -> NDArray[Any]:
    if part.indices is None or (np.diff(part.indices) >= 0).all():
        return part.array
    ordered: NDArray[Any] = part.array[np.argsort(part.indices, kind="stable")]
    return ordered


def _agreed_counts(flat: Sequence[tuple[str, str, Part]], workers: Workers) -> list[list[int]]:
    """Collective. Return each part's number of rows on each worker; 0 of what is not gathered."""
    layout = []
    for metric, key, part in flat:
        gathers = part.reduction == "gather"
        shape = part.array.shape[1:] if gathers else part.array.shape
        kind = str(part.array.dtype) if gathers else ""
        layout.append(((metric, key, part.reduction, shape, kind), len(part.array) if gathers else 0))
    everyone = workers.allgather_object(layout)
    for rank, other in enumerate(everyone):
        for first, own in zip_longest([key for key, _ in everyone[0]], [key for key, _ in other]):
            if first != own:
                metric = (first or own)[0]
                on_zero, on_other = ("nothing" if found is None else found[1:] for found in (first, own))
                raise TaskError(
                    f"metrics[{metric!r}]: the workers' states differ: {on_zero} on rank 0 and {on_other} on "
                    f"rank {rank}",
                    "Return the same names, types and shapes for every batch.",
                    everywhere=True,
                )
    return [[of_worker[place][1] for of_worker in everyone] for place in range(len(flat))]


def _summed(arrays: Sequence[NDArray[np.float64]], collectives: Collectives) -> list[NDArray[np.float64]]:
    """Collective. Return the sums of arrays over workers, by one all-reduce."""
    vector = collectives.sum(np.concatenate([array.reshape(-1) for array in arrays]))
    pieces = np.split(vector, np.cumsum([array.size for array in arrays])[:-1])
    return [piece.reshape(array.shape) for piece, array in zip(pieces, arrays, strict=True)]


class _Positions:
    """Gathers rows on rank 0, each at the place that its sample has in the data set."""

    def __init__(self, workers: Workers, collectives: Collectives) -> None:
        self._workers, self._collectives = workers, collectives
        self._known: tuple[NDArray[np.int64] | None, NDArray[np.int64]] | None = None

    def gathered(self, part: Part, counts: Sequence[int]) -> NDArray[Any]:
        """Collective. Return the rows of all workers on rank 0."""
        if self._workers.size == 1:
            return _in_order(part)
        places = self._places(part, counts)
        return self._sent(part.array, counts, places)

    def _places(self, part: Part, counts: Sequence[int]) -> NDArray[np.int64]:
        """Collective. Return where the rows of all workers, in the order of ranks, belong; on rank 0."""
        if part.indices is None:
            return np.arange(sum(counts))
        if self._known is None or self._known[0] is not part.indices:  # parts of one metric share them
            found = self._sent(part.indices, counts, np.arange(sum(counts)))
            places = np.empty(len(found), np.int64)
            places[np.argsort(found, kind="stable")] = np.arange(len(found))
            self._known = part.indices, places
        return self._known[1]

    def _sent(self, array: NDArray[Any], counts: Sequence[int], places: NDArray[np.int64]) -> NDArray[Any]:
        """Collective. Send rows to rank 0, a chunk at a time."""
        array = np.require(array, requirements=["C", "W"])
        on_root = self._workers.rank == 0
        result = np.empty((sum(counts) if on_root else 0, *array.shape[1:]), array.dtype)
        size = array.dtype.itemsize * int(np.prod(array.shape[1:]))
        if not size:
            return result
        step = max(1, _CHUNK_BYTES // size)
        starts = np.concatenate(([0], np.cumsum(counts)))
        for begin in range(0, max(counts), step):
            chunk = array[begin : begin + step]
            data = self._collectives.gather(chunk.reshape(-1).view(np.uint8))
            if on_root:
                rows = data.view(array.dtype).reshape(-1, *array.shape[1:])
                own = [
                    np.arange(starts[rank] + begin, starts[rank] + min(begin + step, count))
                    for rank, count in enumerate(counts)
                ]
                result[places[np.concatenate(own)]] = rows
        return result
