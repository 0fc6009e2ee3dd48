"""Keras optimizers as portable state, and the state of a whole job: loading and snapshots.

``torch/optimizer_state.py`` does the same for PyTorch; the rules are in ``portable/names.py``.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.base import PortableState
from hvdtrain.backends.portable.ema import has_ema
from hvdtrain.backends.portable.names import check_state, check_unique
from hvdtrain.backends.tensorflow.ema import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.formulas import SGD
from hvdtrain.backends.tensorflow.model_state import Field, ModelState, TensorFlowSnapshot

_STEP = "optimizer/step"


class TrainingState:
    """Model and optimizer as portable state.

    Args:
        model: the model's variables.
        optimizer: one of hvdtrain's or a task's own, built.
        ema: the moving average of the weights; none if not given.

    Raises:
        TaskError: If two of the optimizer's variables have one name.
    """

    def __init__(
        self, model: ModelState, optimizer: Any, ema: ExponentialMovingAverage | None = None
    ) -> None:
        self.model = model
        self.ema = ema or ExponentialMovingAverage(model, None)
        self._optimizer = optimizer
        self._counts_steps = not isinstance(optimizer, SGD)
        self._slots = list(_slots(optimizer, model.fields))
        check_unique((field.name, field.variable.path) for field in self._slots)

    def snapshot(self) -> TensorFlowSnapshot:
        """Copy everything off the device."""
        state: PortableState = {}
        if self._counts_steps:
            state[_STEP] = np.asarray(self._optimizer.iterations.numpy(), np.int64)
        return TensorFlowSnapshot([*self.model.fields, *self.ema.fields, *self._slots], state)

    def load(self, state: PortableState) -> None:
        """Load portable state, having checked all of it.

        A moving average that is not in it starts anew.

        Raises:
            TaskError: If the state does not fit.
        """
        ema_fields = self.ema.fields if has_ema(state) else []
        fields = [*self.model.fields, *self._slots, *ema_fields]
        shapes = {field.name: field.shape for field in fields}
        if self._counts_steps:
            shapes[_STEP] = ()
        own_names = {field.name: f"model/{field.own}" for field in self.model.fields}
        check_state(shapes, state, "tf", own_names)
        for field in fields:
            field.write(state)
        if not ema_fields:
            self.ema.restart()
        if self._counts_steps:
            self._optimizer.iterations.assign(int(state[_STEP]))


def _slots(optimizer: Any, fields: list[Field]) -> Iterator[Field]:
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
                    yield replace(field, variable=variable, shape=shape, prefix=f"optimizer/{slot}")
    for variable in optimizer.variables:
        if id(variable) not in known:
            yield Field(
                variable.path, variable.path, variable, tuple(variable.shape), prefix="optimizer/variable"
            )


def _with_inner(optimizer: Any) -> Iterator[Any]:
    """Return an optimizer and those that it wraps, as one that scales losses does."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _slot_lists(optimizer: Any) -> Iterator[tuple[str, list[Any]]]:
    """Return the lists of variables that an optimizer has one of for each parameter.

    Keras names slots after its own names of layers; a list's attribute does not depend on those.
    """
    if hasattr(optimizer, "slots"):
        yield from optimizer.slots.items()
        return
    parameters = optimizer._trainable_variables
    for attribute, values in vars(optimizer).items():
        if attribute in ("_trainable_variables", "_variables") or not isinstance(values, list):
            continue
        if len(values) == len(parameters) and all(v is None or isinstance(v, keras.Variable) for v in values):
            yield attribute.strip("_"), values
