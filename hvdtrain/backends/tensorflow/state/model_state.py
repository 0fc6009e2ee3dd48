"""Keras models as portable state: every variable found, named and laid out; snapshots of them."""

import copy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.portable.names import Renaming, check_unique
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.backends.tensorflow.state.layouts import children, portable_shape, role

Array = NDArray[Any]
Layer = Any
Variable = Any


@dataclass(frozen=True)
class Field:
    """One variable, of a model or of an optimizer's slot."""

    path: str  # portable module path and role, such as "conv1/kernel"
    own: str  # the same without the task's ``state_names``
    variable: Variable  # the Keras variable
    shape: tuple[int, ...]  # the portable array's shape
    trainable: bool = True  # whether it is a parameter that training changes
    prefix: str = "model"  # "model", or "optimizer" and the slot

    @property
    def name(self) -> str:
        """Its name in the portable state."""
        return f"{self.prefix}/{self.path}"

    @property
    def tensors(self) -> tuple[Variable]:
        """The variable, as one of several tensors that an array of PyTorch follows from."""
        return (self.variable,)

    def arrays(self, _: Any) -> Iterator[tuple[str, Array]]:
        """Yield the name and a copy of the variable."""
        yield self.name, self.read()

    def read(self) -> Array:
        """Copy the variable into a portable array."""
        return _laid_out(_copied(self.variable), self.shape)

    def write(self, state: StateArrays) -> None:
        """Copy the state's array of this name into the variable."""
        self.variable.assign(np.reshape(state[self.name], tuple(self.variable.shape)))


def _copied(variable: Variable) -> Array:
    """Copy a variable's values into memory of their own: a step updates variables in place."""
    return np.asarray(variable.numpy())  # TensorFlow's numpy() copies


def _laid_out(array: Array, shape: tuple[int, ...]) -> Array:
    """Return values their portable shape, and float32 in place of what numpy itself does not have."""
    if array.dtype.kind == "V" or array.dtype.isbuiltin != 1:
        array = array.astype(np.float32)
    return array.reshape(shape)


class ModelState:
    """A model's variables under their portable names, each once, in the model's order."""

    def __init__(self, model: Layer, renaming: Renaming) -> None:
        trainable = {id(variable) for variable in model.trainable_variables}
        aliases: dict[int, list[Field]] = {}
        own_names = []
        for layer, variable, own in _variables(model):
            own_names.append(own)
            shape = portable_shape(layer, variable)
            field = Field(renaming(own), own, variable, shape, id(variable) in trainable)
            aliases.setdefault(id(variable), []).append(field)
        for variable in model.weights:
            if id(variable) not in aliases:  # held in a way that the walk does not know
                own_names.append(variable.path)
                shape = tuple(variable.shape)
                field = Field(
                    renaming(variable.path), variable.path, variable, shape, id(variable) in trainable
                )
                aliases[id(variable)] = [field]
        renaming.check_used(own_names)
        self.fields = [min(found, key=lambda field: renaming.rank(field.own)) for found in aliases.values()]
        check_unique((field.path, field.variable.path) for field in self.fields)

    def part(self, chosen: Iterable[bool]) -> "ModelState":
        """Return some of the portable arrays."""
        found = copy.copy(self)
        found.fields = [field for field, is_chosen in zip(self.fields, chosen, strict=True) if is_chosen]
        return found

    def trainable_fields(self) -> Iterator[Field]:
        """Return the portable arrays that training changes."""
        return (field for field in self.fields if field.trainable)

    def freeze(self, names: Collection[str]) -> None:
        """Take the parameters of these portable names out of what training changes."""
        for field in self.fields:
            if field.name in names:
                field.variable.trainable = False
        self.fields = [
            replace(field, trainable=False) if field.name in names else field for field in self.fields
        ]

    def train(self, chosen: Collection[int]) -> None:
        """Take the variables of these identities as those that training changes, and no others."""
        self.fields = [replace(field, trainable=id(field.variable) in chosen) for field in self.fields]


def _variables(model: Layer) -> Iterator[tuple[Layer, Variable, str]]:
    """Return every weight with the layer that holds it and its own name; shared ones once for each path."""
    for path, layer in walk(model):
        inside = {id(v) for _, child in children(layer) for v in child.weights}
        for variable in layer.weights:
            if id(variable) not in inside:
                yield layer, variable, "/".join((*path, role(layer, variable)))


def walk(
    layer: Layer, path: tuple[str, ...] = (), above: tuple[Layer, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Layer]]:
    """Return a layer and all below it with their paths; shared ones once for each path."""
    yield path, layer
    for name, child in children(layer):
        if all(child is not other for other in above):
            yield from walk(child, (*path, name) if name else path, (*above, layer))


class TensorFlowSnapshot:
    """A copy of variables on its way to portable state."""

    def __init__(self, fields: Iterable[Field], numbers: PortableState) -> None:
        self._numbers = numbers
        self._waiting = [(field.name, field.shape, _copied(field.variable)) for field in fields]
        self._waiting.reverse()

    def read(self) -> PortableState:
        """Lay the copies out; may be called once, in another thread."""
        state: PortableState = {}
        while self._waiting:
            name, shape, array = self._waiting.pop()
            state[name] = _laid_out(array, shape)
        return state | self._numbers
