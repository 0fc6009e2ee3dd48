"""Metrics of a whole evaluation: what users write, and what a backend keeps of one while it evaluates."""

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

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
    """Which samples the rows of one micro-batch of an evaluation are.

    Attributes:
        is_counted: (rows,), false for padding and for samples that could not be read.
        indices: (rows,), the samples' indices in the data set.
        total: samples of the evaluation set; 0 if it is not known.
    """

    is_counted: NDArray[np.bool_]
    indices: NDArray[np.int64]
    total: int


class Samples(NamedTuple):
    """Which samples a batch on the device holds, as the host knows it.

    Attributes:
        indices: (accumulate, micro_batch), the samples' indices in the data set.
        total: samples of the evaluation set; 0 if it is not known.
    """

    indices: NDArray[np.int64]
    weights: NDArray[np.float32]
    total: int

    def rows(self, micro_batch: int, count: int) -> Rows:
        """Return the rows of a micro-batch, of which there are fewer if padding has been left out."""
        is_counted, indices = self.weights[micro_batch] > 0, self.indices[micro_batch]
        if count != len(indices):
            is_counted, indices = is_counted[is_counted], indices[is_counted]
        return Rows(is_counted, indices, self.total)


class StatefulMetric(Protocol):
    """A metric as a backend evaluates it: a state that batches are added to."""

    def begin(self) -> None:
        """Forget all batches."""
        ...

    def add(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Add a micro-batch: the model's outputs and the batch, both with padding."""
        ...

    def parts(self) -> Any:
        """Return the state of this worker, of types that travel (see wire.py)."""
        ...

    def compute(self, of_workers: list[Any]) -> Any:
        """Return the metric's value, one number, of the states of all workers. Called on rank 0."""
        ...


def as_number(value: Any) -> float | None:
    """Return what a metric computed as a number, which may be NaN; None if it is not one number."""
    if not hasattr(value, "shape") and not isinstance(value, numbers.Real):
        return None
    array = np.asarray(value)
    return float(array.reshape(())) if array.size == 1 and array.dtype.kind in "fiub" else None
