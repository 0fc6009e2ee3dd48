"""Keras models as portable state: every variable found, named and laid out; snapshots of them."""

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
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
        return _laid_out(self.variable.numpy(), self.shape)  # TensorFlow's numpy() copies

    def write(self, state: StateArrays) -> None:
        """Copy the state's array of this name into the variable."""
        self.variable.assign(np.reshape(state[self.name], tuple(self.variable.shape)))


def _laid_out(array: Array, shape: tuple[int, ...]) -> Array:
    """Return values their portable shape, and float32 in place of what numpy itself does not have."""
    array = np.asarray(array)
    if array.dtype.kind == "V" or array.dtype.isbuiltin != 1:
        array = array.astype(np.float32)
    return array.reshape(shape)


class ModelState:
    """A model's variables under their portable names, each once, in the model's order."""

    def __init__(self, model: Layer, renaming: Renaming) -> None:
        trainable = {id(variable) for variable in model.trainable_variables}
        found = list(_variables(model))
        known = {id(variable) for variable, *_ in found}
        # others are held in a way that the walk does not know
        found += [(v, v.path, tuple(v.shape)) for v in model.weights if id(v) not in known]
        renaming.check_used(own for _, own, _ in found)
        aliases: dict[int, list[Field]] = {}
        for variable, own, shape in found:
            field = Field(renaming(own), own, variable, shape, id(variable) in trainable)
            aliases.setdefault(id(variable), []).append(field)
        self.fields = [min(fields, key=lambda one: renaming.rank(one.own)) for fields in aliases.values()]
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
        self.train({id(one.variable) for one in self.trainable_fields() if one.name not in names})

    def train(self, chosen: Collection[int]) -> None:
        """Take the variables of these identities as those that training changes, and no others."""
        self.fields = [replace(field, trainable=id(field.variable) in chosen) for field in self.fields]


def _variables(model: Layer) -> Iterator[tuple[Variable, str, tuple[int, ...]]]:
    """Return every weight with its own name and its portable shape; shared ones once for each path."""
    for path, layer in walk(model):
        inside = {id(v) for _, child in children(layer) for v in child.weights}
        for variable in layer.weights:
            if id(variable) not in inside:
                yield variable, "/".join((*path, role(layer, variable))), portable_shape(layer, variable)


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

    def __init__(self, fields: Sequence[Field], numbers: PortableState) -> None:
        self._numbers = numbers
        # TensorFlow's numpy() copies: a step updates variables in place
        self._waiting = [(one.name, one.shape, one.variable.numpy()) for one in reversed(fields)]

    def read(self) -> PortableState:
        """Lay the copies out; may be called once, in another thread."""
        state: PortableState = {}
        while self._waiting:
            name, shape, array = self._waiting.pop()
            state[name] = _laid_out(array, shape)
        return state | self._numbers
