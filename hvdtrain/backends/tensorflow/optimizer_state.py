"""Keras optimizers as portable state, and the state of a whole job: loading and snapshots.

``_torch_slots`` does the same for PyTorch; the rules stand in ``base``.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from hvdtrain.backends._averaging import holds_averages
from hvdtrain.backends._keras_averages import Averages
from hvdtrain.backends._keras_optimizers import SGD
from hvdtrain.backends._keras_state import Entry, KerasSnapshot, ModelState
from hvdtrain.backends._names import check_state, check_unique
from hvdtrain.backends.base import PortableState

_STEP = "optimizer/step"


class TrainingState:
    """Model and optimizer as portable state.

    Args:
        model: the model's variables.
        optimizer: one of hvdtrain's or a task's own, built.
        averages: the weights' averages; the model's own, of which there are none, where not given.

    Raises:
        TaskError: where two of the optimizer's variables have one name.
    """

    def __init__(self, model: ModelState, optimizer: Any, averages: Averages | None = None) -> None:
        self.model = model
        self.averages = averages or Averages(model, None)
        self._optimizer = optimizer
        self._counts_steps = not isinstance(optimizer, SGD)
        self._slots = list(_slots(optimizer, model.entries))
        check_unique((entry.name, entry.variable.path) for entry in self._slots)

    def snapshot(self) -> KerasSnapshot:
        """Copy everything off the device."""
        state: PortableState = {}
        if self._counts_steps:
            state[_STEP] = np.asarray(self._optimizer.iterations.numpy(), np.int64)
        return KerasSnapshot([*self.model.entries, *self.averages.entries, *self._slots], state)

    def load(self, state: PortableState) -> None:
        """Load portable state, having checked all of it. Without averages in it, they start anew.

        Raises:
            TaskError: where the state does not fit.
        """
        averages = self.averages.entries if holds_averages(state) else []
        entries = [*self.model.entries, *self._slots, *averages]
        shapes = {entry.name: entry.shape for entry in entries}
        if self._counts_steps:
            shapes[_STEP] = ()
        own_names = {entry.name: f"model/{entry.own}" for entry in self.model.entries}
        check_state(shapes, state, "tf", own_names)
        for entry in entries:
            entry.write(state)
        if not averages:
            self.averages.restart()
        if self._counts_steps:
            self._optimizer.iterations.assign(int(state[_STEP]))


def _slots(optimizer: Any, entries: list[Entry]) -> Iterator[Entry]:
    """Give an optimizer's slots under the names of their parameters, and its other variables."""
    by_variable = {id(entry.variable): entry for entry in entries}
    known = {id(v) for one in _with_inner(optimizer) for v in (one.learning_rate, one.iterations)}
    for one in _with_inner(optimizer):
        for slot, variables in _slot_lists(one):
            for parameter, variable in zip(one._trainable_variables, variables, strict=True):
                if variable is not None and id(variable) not in known:
                    known.add(id(variable))
                    entry = by_variable[id(parameter)]
                    shape = entry.shape if variable.shape == parameter.shape else tuple(variable.shape)
                    yield replace(entry, variable=variable, shape=shape, prefix=f"optimizer/{slot}")
    for variable in optimizer.variables:
        if id(variable) not in known:
            yield Entry(
                variable.path, variable.path, variable, tuple(variable.shape), prefix="optimizer/variable"
            )


def _with_inner(optimizer: Any) -> Iterator[Any]:
    """Give an optimizer and those that it wraps, as one that scales losses does."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _slot_lists(optimizer: Any) -> Iterator[tuple[str, list[Any]]]:
    """Give the lists of variables that an optimizer has one of for each parameter.

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
