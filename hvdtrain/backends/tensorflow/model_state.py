"""Keras models as portable state: every variable found, named and laid out; snapshots of them.

``_torch_state`` does the same for PyTorch; the rules stand in ``base``, the layer types in
``_keras_layouts``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends._keras_layouts import children, portable_shape, role
from hvdtrain.backends._names import Renaming, check_unique
from hvdtrain.backends.base import PortableState

Array = NDArray[Any]
Layer = Any
Variable = Any


@dataclass(frozen=True)
class Entry:
    """One variable, of a model or of an optimizer's slot.

    Attributes:
        path: portable module path and role, such as "conv1/kernel".
        own: the same without the task's ``state_names``.
        variable: the Keras variable.
        shape: the portable array's shape.
        trainable: whether it is a parameter that training changes.
        prefix: "model", or "optimizer" and the slot.
    """

    path: str
    own: str
    variable: Variable
    shape: tuple[int, ...]
    trainable: bool = True
    prefix: str = "model"

    @property
    def name(self) -> str:
        """Its name in the portable state."""
        return f"{self.prefix}/{self.path}"

    def read(self) -> Array:
        """Copy the variable into a portable array."""
        return laid_out(copied(self.variable), self.shape)

    def write(self, state: PortableState) -> None:
        """Copy the state's array of this name into the variable."""
        self.variable.assign(np.reshape(state[self.name], tuple(self.variable.shape)))


def copied(variable: Variable) -> Array:
    """Copy a variable's values into memory of their own: a step updates variables in place."""
    return np.asarray(variable.numpy())  # TensorFlow's numpy() copies


def laid_out(array: Array, shape: tuple[int, ...]) -> Array:
    """Give values their portable shape, and float32 in place of what numpy itself does not have."""
    if array.dtype.kind == "V" or array.dtype.isbuiltin != 1:
        array = array.astype(np.float32)
    return array.reshape(shape)


class ModelState:
    """A model's variables under their portable names.

    Args:
        model: the model.
        renaming: the task's names.

    Attributes:
        entries: the variables, each once, in the model's order.

    Raises:
        TaskError: where two variables have one name, or ``state_names`` does not fit the model.
    """

    def __init__(self, model: Layer, renaming: Renaming) -> None:
        trainable = {id(variable) for variable in model.trainable_variables}
        aliases: dict[int, list[Entry]] = {}
        own_names = []
        for layer, variable, own in _variables(model):
            own_names.append(own)
            shape = portable_shape(layer, variable)
            entry = Entry(renaming(own), own, variable, shape, id(variable) in trainable)
            aliases.setdefault(id(variable), []).append(entry)
        for variable in model.weights:
            if id(variable) not in aliases:  # held in a way that the walk does not know
                own_names.append(variable.path)
                shape = tuple(variable.shape)
                entry = Entry(
                    renaming(variable.path), variable.path, variable, shape, id(variable) in trainable
                )
                aliases[id(variable)] = [entry]
        renaming.check_used(own_names)
        self.entries = [min(found, key=lambda entry: renaming.rank(entry.own)) for found in aliases.values()]
        check_unique((entry.path, entry.variable.path) for entry in self.entries)


def _variables(model: Layer) -> Iterator[tuple[Layer, Variable, str]]:
    """Give every weight with the layer that holds it and its own name; shared ones once for each path."""
    for path, layer in walk(model):
        inside = {id(v) for _, child in children(layer) for v in child.weights}
        for variable in layer.weights:
            if id(variable) not in inside:
                yield layer, variable, "/".join((*path, role(layer, variable)))


def walk(
    layer: Layer, path: tuple[str, ...] = (), above: tuple[Layer, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Layer]]:
    """Give a layer and all below it with their paths; shared ones once for each path."""
    yield path, layer
    for name, child in children(layer):
        if all(child is not other for other in above):
            yield from walk(child, (*path, name) if name else path, (*above, layer))


class KerasSnapshot:
    """A copy of variables on its way to portable state.

    Args:
        entries: the variables.
        numbers: arrays that are ready.
    """

    def __init__(self, entries: Iterable[Entry], numbers: PortableState) -> None:
        self._numbers = numbers
        self._waiting = [(entry.name, entry.shape, copied(entry.variable)) for entry in entries]
        self._waiting.reverse()

    def read(self) -> PortableState:
        """Lay the copies out; may be called once, in another thread."""
        state: PortableState = {}
        while self._waiting:
            name, shape, array = self._waiting.pop()
            state[name] = laid_out(array, shape)
        return state | self._numbers
