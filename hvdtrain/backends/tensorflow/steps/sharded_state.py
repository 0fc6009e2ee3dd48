"""Sharded state in TensorFlow as portable state: gathered part by part on rank 0, and given out again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.backends.portable.initial_values import PREFIX
from hvdtrain.backends.portable.training_state import CommonShardedState, ShardedSlot
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.backends.reduction.shards import OwnSegment
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import ShardedParameters
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.steps.formulas import SGD
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.optimizers import LAMB, LARS

Tensor = Any
Variable = Any


def shard_optimizer(
    optimizer: Any, trainable: Sequence[Field], shards: ShardedParameters | None
) -> list[Variable]:
    """Let an optimizer make its slots, of this worker's segments if they are sharded.

    Returns:
        Its variables that all workers have in common.
    """
    if shards is None:
        optimizer.build([field.variable for field in trainable])
        return list(optimizer.variables)
    _divide(optimizer, trainable, shards)
    optimizer.build(shards.variables)
    own = {id(variable) for variables in optimizer.slots.values() for variable in variables}
    return [variable for variable in optimizer.variables if id(variable) not in own]


def _divide(optimizer: Any, trainable: Sequence[Field], shards: ShardedParameters) -> None:
    """Let an optimizer of hvdtrain's have its options for this worker's segments."""
    place = {field.path: number for number, field in enumerate(trainable)}
    own = [place[segment.entry.path] for segment in shards.segments]
    if optimizer.groups:
        # one without numbers, if this worker has no segment
        optimizer.groups = [optimizer.groups[number] for number in own] or [(1.0, 0.0)]
    if isinstance(optimizer, LARS | LAMB):
        adapted = list(optimizer.adapted or ())
        numbers = {n: count for count, n in enumerate(n for n, has_norms in enumerate(adapted) if has_norms)}
        optimizer.adapted = [adapted[number] for number in own] or [False]
        optimizer.norms = SharedNorms([numbers[n] for n in own if adapted[n]], len(numbers), shards)


class SharedNorms:
    """The norms of parameters of which each worker has a part."""

    def __init__(self, numbers: Sequence[int], count: int, shards: ShardedParameters) -> None:
        self._shards = shards
        self._numbers = list(numbers)
        self._count = count

    def __call__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Collective. Return the norms over all workers of what this worker has parts of."""
        if not self._count:
            return []
        squares = tf.fill([self._count, 2], tf.cast(self._shards.zero.read_value(), tf.float64))
        if pairs:
            own = tf.stack([tf.stack([_square(weight), _square(other)]) for weight, other in pairs])
            squares = tf.tensor_scatter_nd_add(squares, [[number] for number in self._numbers], own)
        norms = tf.sqrt(hvd.allreduce(squares, op=hvd.Sum, name="hvdtrain.norms"))
        self._shards.use([norms])
        return [
            (tf.cast(norms[number, 0], weight.dtype), tf.cast(norms[number, 1], weight.dtype))
            for number, (weight, _) in zip(self._numbers, pairs, strict=True)
        ]


class ShardedMovingAverage(ExponentialMovingAverage):
    """The moving average of this worker's part of the weights."""

    def __init__(self, model: ModelState, decay: float | None, shards: ShardedParameters) -> None:
        super().__init__(model, None)
        self.decay = decay or 0.0
        self._shards = shards
        self.is_kept = decay is not None
        segments = shards.segments if self.is_kept else []
        self._weights = [native(segment.tensor) for segment in segments]
        self._averages = [tf.Variable(weight, trainable=False) for weight in self._weights]
        self._of_segment = dict(zip(map(id, segments), self._averages, strict=True))

    def of(self, segment: OwnSegment) -> Variable:
        """Return the average of a segment."""
        return self._of_segment[id(segment)]

    def restart(self) -> None:
        """Start from the weights as they are."""
        if self.is_kept:
            self._shards.follow()
            super().restart()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Collective. Return a context in which the model's weights are the averages of all workers."""
        with self._shards.replaced(self.of, "ema") if self.is_kept else nullcontext():
            yield

    def to_broadcast(self) -> list[Any]:
        """Return nothing: every worker has averages of its own."""
        return []

    def follow_broadcast(self) -> None:
        """Start from the weights that were broadcast."""
        self.restart()


def _square(tensor: Tensor) -> Tensor:
    """Return the square of a tensor's norm, in fp64."""
    return tf.reduce_sum(tf.square(tf.cast(tensor, tf.float64)))


_STEP = "optimizer/step"


class ShardedState(CommonShardedState, TrainingState):
    """Model and sharded optimizer as portable state."""

    def __init__(
        self, model: ModelState, optimizer: Any, ema: ShardedMovingAverage, shards: ShardedParameters
    ) -> None:
        super().__init__(model, {}, ema)
        self._shards = shards
        self._steps = {} if isinstance(optimizer, SGD) else {_STEP: optimizer.iterations}
        self._count_names = list(self._steps)
        place = {id(segment): number for number, segment in enumerate(shards.segments)}
        self._sharded = [
            ShardedSlot(f"optimizer/{name}", False, lambda s, own=variables: native(own[place[id(s)]]))  # type: ignore[misc]
            for name, variables in optimizer.slots.items()
        ]
        if ema.is_kept:
            self._sharded.append(ShardedSlot(PREFIX, True, ema.of))

    def load(self, state: StateArrays) -> None:
        """Check a whole portable state, and load the model's part; ``distribute`` gives out the rest."""
        super().load(state)
        for name, count in self._steps.items():
            count.assign(int(state[name]))

    def _fields(self, slot: ShardedSlot) -> Iterator[Field]:
        return (replace(field, prefix=slot.prefix) for field in self._shards.entries)

    def _arrays(self, field: Field, values: Mapping[int, Any]) -> Iterable[tuple[str, Any]]:
        own = values.get(id(field.variable))
        yield field.name, field.read() if own is None else own.reshape(field.shape)

    def _fill(self, field: Field, values: Mapping[int, Any], state: PortableState) -> None:
        values[id(field.variable)][...] = state[field.name].reshape(-1)

    def _gather_counts(self) -> PortableState:
        return {name: np.asarray(count.numpy(), np.int64) for name, count in self._steps.items()}
