"""The states of the metrics of a whole evaluation: sums, gathered rows, and what r2 needs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.stateful_metrics import GatheredMetric, Part, Rows, SumMetric, Update
from hvdtrain.backends.workers import Sized, group_of, peer_errors
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers

_CHUNK_BYTES = 1 << 26  # rows of one worker that travel at once
_OF_ROWS = {"max": np.max, "min": np.min}

Parts = Mapping[str, Mapping[str, Part]]


class Collectives(ABC):
    """How objects, as bytes, and the states of metrics move between workers.

    Args:
        workers: some of the job's workers, among which they move; None for all.
    """

    hvd: ClassVar[Any]  # Horovod's binding of the framework
    to_tensor: ClassVar[Any]  # returns an array as a tensor
    on_host: ClassVar[Any] = nullcontext  # returns a context in which tensors lie in the host's memory

    def __init__(self, workers: Sized | None = None) -> None:
        self._workers = workers
        self._group = group_of(workers)

    @abstractmethod
    def is_under_way(self) -> bool:
        """Return whether this worker began an operation that it has not waited for."""

    def join(self, data: NDArray[np.uint8], name: str = "hvdtrain.objects") -> NDArray[np.uint8]:
        """Collective. Return the workers' bytes in the order of ranks, on every worker."""
        with peer_errors(), self.on_host():
            joined = self.hvd.allgather(self.to_tensor(data), name=name, **self._group)
        return np.asarray(joined.numpy())

    def sum(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """Collective. Return the sum of the workers' vectors."""
        with peer_errors(), self.on_host():
            name = "hvdtrain.metric_sums"
            summed = self.hvd.allreduce(self.to_tensor(vector), op=self.hvd.Sum, name=name, **self._group)
        return np.asarray(summed.numpy())

    def gather(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Collective. Return the workers' bytes in the order of ranks on rank 0, and none on others."""
        splits = np.zeros(self.hvd.size() if self._workers is None else self._workers.size, np.int32)
        splits[0] = len(data)
        with peer_errors(), self.on_host():
            sent = self.to_tensor(data), self.to_tensor(splits)
            gathered, _ = self.hvd.alltoall(*sent, name="hvdtrain.metric_rows", **self._group)
        return np.asarray(gathered.numpy())


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


ToNumpy = Callable[[Any], NDArray[Any]]
M = TypeVar("M", SumMetric, GatheredMetric)


class _OwnState(Generic[M]):
    """What the states of the metrics that users may write have in common.

    Args:
        name: the metric's, in messages.
        metric: what the user or a named metric gives.
        to_numpy: returns a tensor of the framework as an array.
    """

    def __init__(self, name: str, metric: M, to_numpy: ToNumpy) -> None:
        self._name, self._to_numpy = name, to_numpy
        self._metric: M = metric
        self.begin()

    def begin(self) -> None:
        """Forget all batches."""
        raise NotImplementedError

    def compute(self, merged: dict[str, NDArray[Any]]) -> Any:
        """Return the metric's value."""
        return self._metric.compute(merged)

    def _updated(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> dict[str, NDArray[Any]]:
        """Return what the metric gives for a micro-batch, checked."""
        return updated(
            self._name, self._metric.update, self._to_numpy, outputs, batch, samples=len(rows.indices)
        )


class SumState(_OwnState[SumMetric]):
    """A ``SumMetric`` in an evaluation."""

    def begin(self) -> None:
        """Forget all batches."""
        self._sums: dict[str, NDArray[np.float64]] = {}

    def add(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Add a micro-batch."""
        given = self._updated(outputs, batch, rows)
        sums = {key: array[rows.is_counted].sum(0, dtype=np.float64) for key, array in given.items()}
        if self._sums:
            check_stays(self._name, _shapes(self._sums), _shapes(sums))
        self._sums = {key: self._sums.get(key, 0.0) + value for key, value in sums.items()}

    def parts(self) -> Mapping[str, Part]:
        """Return the state of this worker."""
        return {key: Part(value, "sum") for key, value in self._sums.items()}


class GatheredState(_OwnState[GatheredMetric]):
    """A ``GatheredMetric`` in an evaluation."""

    def begin(self) -> None:
        """Forget all batches."""
        self._rows: dict[str, list[NDArray[Any]]] = {}
        self._indices: list[NDArray[np.int64]] = []

    def add(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Add a micro-batch."""
        given = self._updated(outputs, batch, rows)
        if self._rows:
            before = {key: arrays[0][0:0] for key, arrays in self._rows.items()}
            check_stays(self._name, _row_shapes(before), _row_shapes(given))
        else:
            check_memory(self._name, given, rows.total, self._metric.max_bytes)
        for key, array in given.items():
            self._rows.setdefault(key, []).append(array[rows.is_counted])  # a copy: buffers may be reused
        self._indices.append(rows.indices[rows.is_counted])

    def parts(self) -> Mapping[str, Part]:
        """Return the state of this worker."""
        indices = np.concatenate(self._indices)
        for key, arrays in self._rows.items():
            self._rows[key] = [np.concatenate(arrays)]  # which frees the arrays of this key
        return {key: Part(arrays[0], "gather", indices) for key, arrays in self._rows.items()}


class R2State:
    """The coefficient of determination in an evaluation.

    Sums of squares around each worker's own mean are merged: plain sums of squares would lose the digits of
    targets that are large and differ little. Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances" (1979).

    Args:
        name: the metric's, in messages.
        update: returns "outputs" and "targets", both (samples, numbers).
        to_numpy: returns a tensor of the framework as an array.
    """

    def __init__(self, name: str, update: Update, to_numpy: ToNumpy) -> None:
        self._name, self._update, self._to_numpy = name, update, to_numpy
        self.begin()

    def begin(self) -> None:
        """Forget all batches."""
        self._state: NDArray[np.float64] | None = None  # (4, numbers): count, mean, squares, residuals

    def add(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Add a micro-batch."""
        given = updated(self._name, self._update, self._to_numpy, outputs, batch, samples=len(rows.indices))
        targets, found = (
            given[key][rows.is_counted].astype(np.float64).reshape(-1, *given[key].shape[1:])
            for key in ("targets", "outputs")
        )
        count = len(targets)
        mean = targets.mean(0) if count else np.zeros(targets.shape[1:])
        squares, residuals = ((targets - mean) ** 2).sum(0), ((targets - found) ** 2).sum(0)
        state = np.stack([np.full(mean.shape, float(count)), mean, squares, residuals])
        self._state = state if self._state is None else _merged_moments(self._state, state)

    def parts(self) -> Mapping[str, Part]:
        """Return the state of this worker."""
        assert self._state is not None  # an evaluation has at least one batch
        return {"moments": Part(self._state, "stack")}

    def compute(self, merged: dict[str, NDArray[Any]]) -> Any:
        """Return the mean over the targets' numbers, as scikit-learn's ``r2_score`` does."""
        first, *others = merged["moments"]
        for other in others:
            first = _merged_moments(first, other)
        count, _, squares, residuals = first
        if (count < 2).any():
            return float("nan")
        constant = squares == 0
        values = 1 - residuals / np.where(constant, 1.0, squares)
        return np.where(constant, np.where(residuals == 0, 1.0, 0.0), values).mean()


def _merged_moments(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    count = one[0] + other[0]
    difference = other[1] - one[1]
    share = other[0] / np.where(count > 0, count, 1.0)
    mean = one[1] + difference * share
    squares = one[2] + other[2] + difference**2 * one[0] * share
    return np.stack([count, mean, squares, one[3] + other[3]])


def updated(
    name: str, update: Update, to_numpy: ToNumpy, outputs: Any, batch: Mapping[str, Any], *, samples: int
) -> dict[str, NDArray[Any]]:
    """Call an update and return its rows as arrays.

    Raises:
        TaskError: If it does not return a row of numbers for each sample.
    """
    given = update(outputs, batch)
    if not isinstance(given, Mapping) or not given:
        raise TaskError(
            f"metrics[{name!r}]: update must return a mapping of names to tensors (samples, ...); found "
            f"{'an empty one' if isinstance(given, Mapping) else type(given).__name__}",
            'Return such as {"right": right}, with a row for each sample.',
        )
    arrays = {str(key): np.asarray(to_numpy(value)) for key, value in given.items()}
    for key, array in arrays.items():
        if array.shape[:1] != (samples,) or array.dtype.kind not in "fiub":
            raise TaskError(
                f"metrics[{name!r}]: update must return a row of numbers for each sample, shape "
                f"({samples}, ...); found {array.dtype} {array.shape} for {key!r}",
                "Add up over all axes but the first, and not over samples: hvdtrain adds those that count.",
            )
    return arrays


def check_stays(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that an update returned names and shapes as in the batch before.

    Raises:
        TaskError: naming both.
    """
    if before != now:
        raise TaskError(
            f"metrics[{name!r}]: update returned rows {dict(before)} before, and now {dict(now)}",
            "Return the same names and shapes for every batch: pad all samples to one length, or add up over "
            "the axis that differs.",
        )


def check_memory(name: str, given: Mapping[str, NDArray[Any]], total: int, max_bytes: int) -> None:
    """Check that the rows of all samples fit into the memory that a metric may take on rank 0.

    Raises:
        TaskError: with what they would take.
    """
    of_sample = sum(array.nbytes // max(1, len(array)) for array in given.values())
    if of_sample * total > max_bytes:
        raise TaskError(
            f"metrics[{name!r}] would gather {_in_units(of_sample * total)} on rank 0: {of_sample:,} bytes "
            f"for each of {total:,} samples; it may take {_in_units(max_bytes)}",
            "Return fewer or smaller numbers for each sample, compute it from sums (hvdtrain.SumMetric), or, "
            "if rank 0 has the memory, give hvdtrain.GatheredMetric(update, compute, max_bytes=...).",
        )


def _in_units(size: int) -> str:
    unit, power = ("GiB", 30) if size >= 1 << 27 else ("MiB", 20) if size >= 1 << 17 else ("KiB", 10)
    return f"{size / (1 << power):.3g} {unit}"


def _shapes(arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    return {key: array.shape for key, array in arrays.items()}


def _row_shapes(arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {key: (array.shape[1:], str(array.dtype)) for key, array in arrays.items()}
