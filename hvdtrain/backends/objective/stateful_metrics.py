"""Metrics of a whole evaluation: what users write, and what a backend keeps of one while it evaluates."""

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.gathering import parted
from hvdtrain.backends.workers import Sized, group_of, peer_errors
from hvdtrain.errors import HvdtrainError, TaskError
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.user_errors import where_raised

# (outputs, batch) -> name to tensor (samples, ...)
Update = Callable[[Any, Any], Mapping[str, Any]]

MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class SumMetric:
    """A metric that is computed from sums over all samples of an evaluation.

    Args:
        update: takes (outputs, batch) of one batch and returns a mapping of names to tensors (samples, ...),
            a row for each sample. Rows are added over all samples of all workers, in float64; padding
            does not count.
        compute: takes the mapping of names to sums, which are numpy arrays of float64, and returns a number.
    """

    update: Update
    compute: Callable[[dict[str, NDArray[np.float64]]], Any]


@dataclass(frozen=True)
class GatheredMetric:
    """A metric that is computed from rows of all samples of an evaluation, on rank 0.

    Args:
        update: takes (outputs, batch) of one batch and returns a mapping of names to tensors (samples, ...),
            a row for each sample.
        compute: takes the mapping of names to numpy arrays (all samples, ...), in the order of the data
            set, and returns a number.
        max_bytes: what the rows of all samples may take on rank 0.
    """

    update: Update
    compute: Callable[[dict[str, NDArray[Any]]], Any]
    max_bytes: int = MAX_BYTES


class Rows(NamedTuple):
    """Which samples the rows of one micro-batch of an evaluation are."""

    is_counted: NDArray[np.bool_]  # (rows,), false for padding and for samples that could not be read
    indices: NDArray[np.int64]  # (rows,), in the data set
    total: int  # samples of the evaluation set; 0 if it is not known


class Samples(NamedTuple):
    """Which samples a batch on the device holds, as the host knows it."""

    indices: NDArray[np.int64]  # (accumulate, micro_batch), in the data set
    weights: NDArray[np.float32]
    total: int  # samples of the evaluation set; 0 if it is not known

    def rows(self, micro_batch: int, count: int) -> Rows:
        """Return the rows of a micro-batch, of which there are fewer if padding has been left out."""
        is_counted, indices = self.weights[micro_batch] > 0, self.indices[micro_batch]
        if count != len(indices):
            is_counted, indices = is_counted[is_counted], indices[is_counted]
        return Rows(is_counted, indices, self.total)


_CHUNK_BYTES = 1 << 26  # of all workers that travel at once

ToNumpy = Callable[[Any], NDArray[Any]]
# of a worker: arrays of rows by name, and each row's index in the data set
_Part = tuple[dict[str, NDArray[Any]], NDArray[np.int64]]


class Collectives:
    """How objects, as bytes, and the model's statistics move between workers."""

    def __init__(
        self,
        workers: Sized | None = None,
        *,
        hvd: Any,  # Horovod's binding of the framework
        to_tensor: Callable[[NDArray[Any]], Any],
        is_under_way: Callable[[], bool],  # whether this worker began an operation that it has not waited for
        on_host: Callable[[], AbstractContextManager[Any]] = nullcontext,  # tensors lie in the host's memory
    ) -> None:
        self._group, self.is_under_way = group_of(workers), is_under_way
        self.hvd, self._to_tensor, self._on_host = hvd, to_tensor, on_host

    def join(self, data: NDArray[np.uint8], name: str = "hvdtrain.objects") -> NDArray[np.uint8]:
        """Collective. Return the workers' bytes in the order of ranks, on every worker."""
        with peer_errors(), self._on_host():
            joined = self.hvd.allgather(self._to_tensor(data), name=name, **self._group)
        return np.asarray(joined.numpy())

    def sum(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """Collective. Return the sum of the workers' vectors; of the model's statistics."""
        with peer_errors(), self._on_host():
            name = "hvdtrain.statistics"
            summed = self.hvd.allreduce(self._to_tensor(vector), op=self.hvd.Sum, name=name, **self._group)
        return np.asarray(summed.numpy())


def on_rank_zero(value: Any, workers: Workers) -> list[Any]:
    """Collective. Return the values of all workers on rank 0, and none on others."""
    if workers.size == 1:
        return [value]
    # in chunks: no other worker needs the memory of all, and Horovod counts bytes in 32 bits
    data = wire.encode(value)
    found = [bytearray() for _ in range(workers.size)]
    chunk = max(1, _CHUNK_BYTES // workers.size)
    for begin in range(0, max(workers.allgather_object(len(data))), chunk):
        for rank, part in enumerate(workers.allgather_object(data[begin : begin + chunk])):
            if workers.rank == 0:
                found[rank] += part
    return [wire.decode(memoryview(own)) for own in found] if workers.rank == 0 else []


class RowsState:
    """A ``SumMetric`` or ``GatheredMetric`` in an evaluation; a sum is kept as a single row."""

    def __init__(self, name: str, metric: SumMetric | GatheredMetric, to_numpy: ToNumpy) -> None:
        self._name, self._metric, self._to_numpy = f"metrics[{name!r}]", metric, to_numpy
        self._is_sum = isinstance(metric, SumMetric)
        self.begin()

    def begin(self) -> None:
        """Forget all batches."""
        self._rows: dict[str, list[NDArray[Any]]] = {}
        self._indices = [np.empty(0, np.int64)]

    def add(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> dict[str, NDArray[Any]]:
        """Add a micro-batch; return its rows, of padding, too."""
        with _named(f"{self._name} fails"):
            given = self._updated(outputs, batch, len(rows.indices))
        counted = {key: array[rows.is_counted] for key, array in given.items()}  # copies of the buffers
        if self._is_sum:
            counted = {key: array.sum(0, dtype=np.float64, keepdims=True) for key, array in counted.items()}
        else:
            of_sample = sum(array.nbytes // max(1, len(array)) for array in given.values())
            most = getattr(self._metric, "max_bytes", np.inf)
            if of_sample * rows.total > most:
                raise TaskError(
                    f"{self._name} would gather {of_sample * rows.total / 2**20:,.4g} MiB on rank 0: "
                    f"{of_sample:,} bytes for each of {rows.total:,} samples; it may take "
                    f"{most / 2**20:,.4g} MiB",
                    "Give fewer or smaller numbers for each sample, such as class numbers (preds= of a "
                    "MetricObject), compute it from sums (hvdtrain.SumMetric), or, if rank 0 has the memory, "
                    "give it max_bytes=...",
                )
            self._indices.append(rows.indices[rows.is_counted])
        self._check_stays({key: parts[0] for key, parts in self._rows.items()} or counted, counted)
        for key, array in counted.items():
            kept = self._rows.setdefault(key, [])
            if self._is_sum and kept:
                kept[0] = array + kept[0]
            else:
                kept.append(array)
        return given

    def tried(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> float:
        """Return the value of a micro-batch alone, and refuse rows that depend on other samples."""
        given = self.add(outputs, batch, rows)
        self._check_alone(outputs, batch, len(rows.indices), given)
        return self.value([self.parts()], "compute fails for the first batch alone")

    def parts(self) -> _Part:
        """Return the state of this worker."""
        rows = {key: np.concatenate(self._rows.pop(key)) for key in list(self._rows)}
        return rows, np.concatenate(self._indices)

    def value(self, of_workers: list[_Part], problem: str = "compute fails") -> float:
        """Return the metric's value, of sums or of rows in the order of the data set; it may be NaN."""
        for other, _ in of_workers:
            self._check_stays(of_workers[0][0], other)
        order = np.argsort(np.concatenate([indices for _, indices in of_workers]), kind="stable")
        rows = {}
        for key in list(of_workers[0][0]):  # one after the other: they may be large
            joined = np.concatenate([part.pop(key) for part, _ in of_workers])
            rows[key] = joined.sum(0) if self._is_sum else joined[order]
        with _named(f"{self._name}: {problem}"):
            value = self._metric.compute(rows)
            array = np.asarray(value) if hasattr(value, "shape") or isinstance(value, numbers.Real) else None
            if array is not None and array.size == 1 and array.dtype.kind in "fiub":
                return float(array.reshape(()))
        found = type(value).__name__ if array is None else f"{array.dtype} {array.shape}"
        raise TaskError(
            f"{self._name}: compute must return one number; found {found}",
            "Return a float, and float('nan') where the metric is not defined. Of several numbers, give each "
            "a metric of its own; an object may average them, such as by average='macro', or give one: "
            "hvdtrain.MetricObject(..., result=lambda value: value[0]).",
        )

    def _updated(self, outputs: Any, batch: Mapping[str, Any], samples: int) -> dict[str, NDArray[Any]]:
        given = self._metric.update(outputs, batch)
        if not isinstance(given, Mapping) or not given:
            raise TaskError(
                f"{self._name}: update must return a mapping of names to tensors (samples, ...); "
                f"found {'an empty one' if isinstance(given, Mapping) else type(given).__name__}",
                'Return such as {"right": right}, with a row for each sample.',
            )
        arrays = {str(key): np.asarray(self._to_numpy(value)) for key, value in given.items()}
        for key, array in arrays.items():
            if array.shape[:1] != (samples,) or array.dtype.kind not in "fiub":
                raise TaskError(
                    f"{self._name}: update must return a row of numbers for each sample, shape "
                    f"({samples}, ...); found {array.dtype} {array.shape} for {key!r}",
                    "Add up over all axes but the first, and not over samples: hvdtrain does that.",
                )
        return arrays

    def _check_alone(
        self, outputs: Any, batch: Mapping[str, Any], samples: int, given: Mapping[str, NDArray[Any]]
    ) -> None:
        """Refuse rows that depend on other samples, as those of (n, 1) broadcast with (n,) to (n, n) do."""
        shapes: set[tuple[int, ...]] = set()
        first = _first_rows((outputs, batch), samples, shapes)
        if samples < 3 or not {(samples,), (samples, 1)} <= shapes:
            return
        try:
            with parted():  # nothing is gathered: other workers may not call it
                alone = self._updated(first[0], first[1], 2)
        except Exception:  # a batch that is no batch without its other rows
            return
        for key, array in given.items():
            found, row = alone[key], array[:2]
            if found.shape != row.shape or not np.allclose(found, row, 1e-3, 1e-6, equal_nan=True):
                raise TaskError(
                    f"{self._name}: rows that update returns depend on the other samples of the batch: "
                    f"{key!r} is {array.shape}, and differs for two samples alone. Arrays of shapes "
                    f"({samples}, 1) and ({samples},) are broadcast to ({samples}, {samples})",
                    "Give both the same shape: take the last axis of size 1 away, as outputs.squeeze(-1) "
                    "does in PyTorch and tf.squeeze(outputs, -1) in TensorFlow.",
                )

    def _check_stays(self, before: Mapping[str, NDArray[Any]], now: Mapping[str, NDArray[Any]]) -> None:
        one, other = (
            {key: (str(array.dtype), array.shape[1:]) for key, array in rows.items()}
            for rows in (before, now)
        )
        if one != other:
            raise TaskError(
                f"{self._name}: update returned {one} for one batch, and {other} for another",
                "Return the same names, types and shapes for every batch: pad all samples to one length, or "
                "add up over the axis that differs.",
            )


def _first_rows(value: Any, samples: int, shapes: set[tuple[int, ...]]) -> Any:
    """Return outputs or a batch of two samples; add the shapes of all tensors."""
    if isinstance(value, Mapping):
        return {key: _first_rows(part, samples, shapes) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_first_rows(part, samples, shapes) for part in value]
    if not hasattr(value, "shape"):
        return value
    shapes.add(tuple(value.shape))
    value = value[:2] if tuple(value.shape)[:1] == (samples,) else value
    return value.cpu() if hasattr(value, "cpu") else value  # numbers of rows that are left out end a GPU


@contextmanager
def _named(problem: str) -> Iterator[None]:
    """Return a context whose exceptions, if they are not hvdtrain's, become a TaskError."""
    try:
        yield
    except HvdtrainError:
        raise
    except Exception as error:
        raise TaskError(
            f"{problem}: {where_raised(error, own_only=True)}",
            "--debug shows the traceback. A dry run computes metrics of its first batch, too: return "
            "float('nan') where so few samples do not define one.",
        ) from error
