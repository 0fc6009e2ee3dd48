"""Keras optimizers as portable state, and the state of a whole job: loading and snapshots."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.portable.training_state import CommonOptimizerState, CommonState
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState, TensorFlowSnapshot
from hvdtrain.backends.tensorflow.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.steps.optimizers import SGD


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
