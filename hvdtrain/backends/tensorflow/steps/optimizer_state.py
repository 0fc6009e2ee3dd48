"""Keras optimizers as portable state, and the state of a whole job, on each worker or in parts on each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.portable.initial_values import PREFIX
from hvdtrain.backends.portable.training_state import (
    CommonOptimizerState,
    CommonShardedState,
    CommonState,
    ShardedSlot,
)
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.backends.reduction.shards import CommonShardedAverage
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import ShardedParameters
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState, TensorFlowSnapshot
from hvdtrain.backends.tensorflow.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.steps.optimizers import SGD

Variable = Any


class OptimizerState(CommonOptimizerState):
    """One optimizer as portable state."""

    def __init__(self, model: ModelState, optimizer: Any, prefix: str) -> None:
        super().__init__(model, optimizer, prefix)
        self._slots = list(_slots(optimizer, model.fields, self.prefix))
        # the count of steps, by portable name
        self._counts = {} if isinstance(optimizer, SGD) else {self._step: optimizer.iterations}

    def slot_fields(self) -> list[Field]:
        """Return the slots, under the names of their parameters, and other variables."""
        return self._slots

    def values(self) -> PortableState:
        """Return the count of steps, if the optimizer needs it."""
        return {name: np.asarray(count.numpy(), np.int64) for name, count in self._counts.items()}

    def write_numbers(self, state: StateArrays) -> None:
        """Set what ``values`` returns."""
        for name, count in self._counts.items():
            count.assign(int(state[name]))

    def number_names(self) -> list[str]:
        """Return the names of the numbers that every state has."""
        return list(self._counts)


class TrainingState(CommonState):
    """Model and optimizers as portable state."""

    framework = "tf"
    kinds = OptimizerState, TensorFlowSnapshot, ExponentialMovingAverage


def _slots(optimizer: Any, fields: list[Field], prefix: str) -> Iterator[Field]:
    """Return an optimizer's slots under the names of their parameters, and its other variables."""
    by_variable = {id(field.variable): field for field in fields}
    known = {id(v) for one in _with_inner(optimizer) for v in (one.learning_rate, one.iterations)}
    for one in _with_inner(optimizer):
        for slot, variables in _slot_lists(one):
            for parameter, variable in zip(one._trainable_variables, variables, strict=True):
                if variable is not None and id(variable) not in known:
                    known.add(id(variable))
                    field = by_variable[id(parameter)]
                    shape = field.shape if variable.shape == parameter.shape else tuple(variable.shape)
                    yield replace(field, variable=variable, shape=shape, prefix=f"{prefix}{slot}")
    for variable in optimizer.variables:
        if id(variable) not in known:
            shape = tuple(variable.shape)
            yield Field(variable.path, variable.path, variable, shape, prefix=f"{prefix}variable")


def slots_by_parameter(optimizer: Any) -> dict[int, list[Any]]:
    """Return an optimizer's slots by the identity of their parameters."""
    found: dict[int, list[Any]] = {}
    for one in _with_inner(optimizer):
        for _, variables in _slot_lists(one):
            for parameter, variable in zip(one._trainable_variables, variables, strict=True):
                if variable is not None:
                    found.setdefault(id(parameter), []).append(variable)
    return found


def _with_inner(optimizer: Any) -> Iterator[Any]:
    """Return an optimizer and those that it wraps, as one that scales losses does."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _slot_lists(optimizer: Any) -> Iterator[tuple[str, list[Any]]]:
    """Return the lists of variables that an optimizer has one of for each parameter."""
    if hasattr(optimizer, "slots"):
        yield from optimizer.slots.items()
        return
    parameters = optimizer._trainable_variables
    for attribute, values in vars(optimizer).items():
        if attribute in ("_trainable_variables", "_variables") or not isinstance(values, list):
            continue
        if len(values) == len(parameters) and all(v is None or isinstance(v, keras.Variable) for v in values):
            yield attribute.strip("_"), values


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
        optimizer.groups = own_groups or [(1.0, 0.0, False)]  # of no numbers, where there is no segment
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
