"""Sharded state in TensorFlow as portable state: gathered part by part on rank 0, and given out again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.portable.initial_values import PREFIX
from hvdtrain.backends.portable.training_state import CommonShardedState, ShardedSlot
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.backends.reduction.shards import CommonShardedAverage
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import ShardedParameters
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.optimizers import SGD

Tensor = Any
Variable = Any


def shard_optimizer(
    optimizer: Any, trainable: Sequence[Field], shards: ShardedParameters | None
) -> list[Variable]:
    """Let an optimizer make its slots, of this worker's segments alone if sharded; return what all have."""
    if shards is None:
        optimizer.build([field.variable for field in trainable])
        return list(optimizer.variables)
    if optimizer.groups:
        place = {field.path: number for number, field in enumerate(trainable)}
        own_groups = [optimizer.groups[place[segment.entry.path]] for segment in shards.segments]
        optimizer.groups = own_groups or [(1.0, 0.0)]  # one without numbers, if this worker has no segment
    optimizer.build(shards.variables)
    own = {id(variable) for variables in optimizer.slots.values() for variable in variables}
    return [variable for variable in optimizer.variables if id(variable) not in own]


class ShardedMovingAverage(CommonShardedAverage, ExponentialMovingAverage):
    """The moving average of this worker's part of the weights."""

    _native, _copy = staticmethod(native), staticmethod(partial(tf.Variable, trainable=False))

    def restart(self) -> None:
        """Start from the weights as they are."""
        if self.is_kept:
            self._shards.follow()
            super().restart()


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
