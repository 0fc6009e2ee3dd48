"""What TensorFlow's steps take, and return: batches on the device, metrics on their way from it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.stateful_metrics import Samples
from hvdtrain.backends.step_metrics import PendingVector
from hvdtrain.data.feed import HostBatch
from hvdtrain.workers.agreement import Workers

Tensor = Any
Sized = Any  # what a sum over workers depends on, such as what follows here: size, may_reduce, is_elastic


class FixedSize(NamedTuple):
    """A number of workers that does not change."""

    size: int
    is_elastic: bool = False

    @property
    def may_reduce(self) -> bool:
        """Whether steps hold collectives."""
        return self.size > 1


class TracedWorkers:
    """The workers for steps that are traced once: in an elastic job, rank and size are variables."""

    def __init__(self, workers: Workers) -> None:
        self.most, self.is_elastic, self.may_reduce = workers.most, workers.is_elastic, workers.may_reduce
        self.workers = workers
        if self.is_elastic:
            self._size = tf.Variable(float(workers.size), trainable=False, name="workers")
            self._rank = tf.Variable(workers.rank, trainable=False, name="rank", dtype=tf.int32)

    @property
    def size(self) -> Any:
        """Number of workers: an int, or in an elastic job a tensor of type float32."""
        return self._size.read_value() if self.is_elastic else self.workers.size

    @property
    def local_size(self) -> int:
        """Number of workers on this host."""
        return self.workers.local_size

    @property
    def rank(self) -> Any:
        """The rank of this worker: an int, or in an elastic job a tensor of type int32."""
        return self._rank.read_value() if self.is_elastic else self.workers.rank

    def enter_world(self) -> None:
        """Take rank and size anew. Local: no collective."""
        if self.is_elastic:
            # Python numbers would be kept by TensorFlow for ever
            self._size.assign(np.asarray(self.workers.size, np.float32))
            self._rank.assign(np.asarray(self.workers.rank, np.int32))


Signature = tuple[tuple[tuple[int | None, ...], np.dtype[Any]], ...]


@dataclass(frozen=True, slots=True)
class TensorFlowBatch:
    """One worker's part of one step on its device."""

    step: int  # the step, counted from 0
    # name to tensor (accumulate, micro_batch, ...); without the first axis if there is one micro-batch
    arrays: dict[str, Tensor]
    weights: Tensor  # (accumulate, micro_batch), likewise
    gradient_weights: Tensor  # likewise: each sample's part in the mean gradient over the global batch
    total_weight: float  # sum of the weights over all workers
    reduced_weight: float  # that over the workers whose gradients are summed: of a local step, this one's
    # shapes and types of the arrays; in an elastic job without the number of micro-batches if there are
    # several, for it changes with the number of workers
    signature: Signature
    total: Tensor  # ``reduced_weight`` as a tensor
    # for each micro-batch, how many samples do not have weight 0, or all if none counts; none without padding
    counts: tuple[int, ...]
    samples: Samples  # which samples they are
    in_warmup: bool = False  # whether the step begins while the learning rate is still rising to its peak


class BatchMaker:
    """Copies batches to the device; what they have of weights is kept while it stays the same."""

    def __init__(self, is_elastic: bool = False, is_local: bool = False) -> None:
        self._is_elastic = is_elastic
        self._is_local = is_local
        self.float_bits = 32
        self._known_weights: tuple[NDArray[Any], tuple[Any, ...]] | None = None

    def __call__(self, batch: HostBatch) -> TensorFlowBatch:
        """Return a batch on the device."""
        one = len(batch.weights) == 1
        weights, gradient_weights, reduced_weight, total, counts = self._weigh(batch, one)
        first: list[int | None] = [None if self._is_elastic and not one else len(batch.weights)]
        return TensorFlowBatch(
            step=batch.step,
            arrays={name: tf.constant(a[0] if one else a) for name, a in batch.arrays.items()},
            weights=weights,
            gradient_weights=gradient_weights,
            total_weight=batch.total_weight,
            reduced_weight=reduced_weight,
            signature=tuple(((*first, *a.shape[1:]), a.dtype) for a in batch.arrays.values()),
            total=total,
            counts=counts,
            samples=Samples(batch.indices, batch.weights, batch.range_samples),
            in_warmup=batch.in_warmup,
        )

    def _weigh(self, batch: HostBatch, one: bool) -> tuple[Any, ...]:
        known = self._known_weights
        if known is None or known[0] is not batch.weights:
            kind = np.dtype(f"float{self.float_bits}").type
            weights = (batch.weights[0] if one else batch.weights).astype(kind, copy=False)
            reduced = float(weights.sum()) if self._is_local else batch.total_weight
            counts = [int(np.count_nonzero(row)) or len(row) for row in batch.weights]
            values = (
                tf.constant(weights),
                tf.constant(weights * kind(1 / (reduced or 1))),
                reduced,
                tf.constant(np.asarray(reduced, kind)),
                () if batch.weights.all() else tuple(counts),
            )
            known = self._known_weights = batch.weights, values
        return known[1]


class TensorFlowPending(PendingVector):
    """The metrics of a step on their way from the device."""

    def _numbers(self) -> list[float]:
        return list(self._vector.numpy().tolist())
