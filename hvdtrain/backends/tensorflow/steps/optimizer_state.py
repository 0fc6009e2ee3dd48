"""Keras optimizers as portable state, and the state of a whole job: loading and snapshots."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.optimizers import MAIN, state_prefixes
from hvdtrain.backends.portable.initial_values import has_ema
from hvdtrain.backends.portable.names import check_unique
from hvdtrain.backends.portable.training_state import CommonState
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.backends.reduction.local_steps import has_outer
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState, TensorFlowSnapshot
from hvdtrain.backends.tensorflow.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.steps.optimizers import SGD


class TrainingState(CommonState):
    """Model and optimizers as portable state."""

    framework = "tf"

    def __init__(
        self,
        model: ModelState,
        optimizers: Any,
        ema: ExponentialMovingAverage | None = None,
        local: Any = None,
    ) -> None:
        self.model = model
        self.ema = ema or ExponentialMovingAverage(model, None)
        self._local = local
        by_name = optimizers if isinstance(optimizers, Mapping) else {MAIN: optimizers}
        prefixes = {name: f"optimizer/{prefix}" for name, prefix in state_prefixes(list(by_name)).items()}
        self._slots = [
            field for name, one in by_name.items() for field in _slots(one, model.fields, prefixes[name])
        ]
        # the counts of steps, by portable name
        self._steps = {
            f"{prefixes[name]}step": one.iterations
            for name, one in by_name.items()
            if not isinstance(one, SGD)
        }
        check_unique((field.name, field.variable.path) for field in self._slots)

    def snapshot(self, kept: PortableState | None = None) -> TensorFlowSnapshot:
        """Copy everything off the device."""
        state = {name: np.asarray(count.numpy(), np.int64) for name, count in self._steps.items()}
        state |= kept or {}
        return TensorFlowSnapshot(
            [*self.model.fields, *self.ema.fields, *self._outer_fields, *self._slots], state
        )

    def load(self, state: StateArrays) -> None:
        """Load portable state, having checked all of it."""
        ema_fields = self.ema.fields if has_ema(state) else []
        outer_fields = self._outer_fields if has_outer(state) else []
        fields = [*self.model.fields, *self._slots, *ema_fields, *outer_fields]
        shapes = {field.name: field.shape for field in fields}
        shapes |= dict.fromkeys(self._steps, ())
        self.check_fits(shapes, state)
        for field in fields:
            field.write(state)
        if not ema_fields:
            self.ema.restart()
        if self._local is not None and not outer_fields:
            self._local.restart()
        for name, count in self._steps.items():
            count.assign(int(state[name]))

    def shapes(self, with_ema: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all arrays, by portable name."""
        fields = [*self.model.fields, *self._slots, *(self.ema.fields if with_ema else ())]
        return {field.name: field.shape for field in fields} | dict.fromkeys(self._steps, ())

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield copies of all arrays with their portable names."""
        for name, count in self._steps.items():
            yield name, np.asarray(count.numpy(), np.int64)
        for field in [*self.model.fields, *self.ema.fields, *self._slots]:
            yield field.name, field.read()


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
