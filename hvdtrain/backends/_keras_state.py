"""Keras models and optimizers as portable state: names from layers, layouts as Keras has them.

``_torch_state`` does the same for PyTorch; the rules stand in ``base``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Layer = Any
Variable = Any

# roles whose Keras name differs from the portable one
_ROLES = {(keras.layers.RMSNormalization, "scale"): "gamma"}


@dataclass(frozen=True)
class Entry:
    """One variable of a model under its portable name.

    Attributes:
        path: portable module path and role, such as "conv1/kernel".
        variable: the Keras variable.
        trainable: whether it is a parameter that training changes.
    """

    path: str
    variable: Variable
    trainable: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The portable array's shape."""
        return tuple(self.variable.shape)

    def read(self) -> Array:
        """Copy the variable into a portable array."""
        return np.array(self.variable.numpy(), order="C")

    def write(self, array: Array) -> None:
        """Copy a portable array into the variable."""
        self.variable.assign(array)


def entries(model: Layer) -> list[Entry]:
    """Give every weight of a model, each variable once."""
    seen: set[int] = set()
    trainable = {id(variable) for variable in model.trainable_variables}
    result = []
    for path, layer in _walk(model, ""):
        inside = {id(v) for child in layer._layers for v in child.weights}
        for variable in layer.weights:
            if id(variable) in seen or id(variable) in inside:
                continue
            seen.add(id(variable))
            role = next(
                (
                    portable
                    for (kind, name), portable in _ROLES.items()
                    if isinstance(layer, kind) and name == variable.name
                ),
                variable.name,
            )
            name = f"{path}/{role}" if path else role
            result.append(Entry(name, variable, id(variable) in trainable))
    return result


def _walk(layer: Layer, path: str) -> Iterator[tuple[str, Layer]]:
    """Give a layer and all below it, each with its path from the model.

    In functional and sequential models a layer goes by its name; in a subclass by the attribute
    (and index) that holds it, as PyTorch names modules.
    """
    yield path, layer
    named = _attribute_names(layer) if not _is_graph(layer) else {}
    for child in layer._layers:
        if isinstance(child, keras.layers.InputLayer):
            continue
        name = named.get(id(child), child.name)
        yield from _walk(child, f"{path}/{name}" if path else name)


def _is_graph(layer: Layer) -> bool:
    return isinstance(layer, keras.Sequential) or type(layer).__name__ == "Functional"


def _attribute_names(layer: Layer) -> dict[int, str]:
    names: dict[int, str] = {}
    for attribute, value in vars(layer).items():
        if attribute == "_layers" or attribute.startswith("_self_"):
            continue  # Keras's and TensorFlow's own bookkeeping
        if isinstance(value, keras.layers.Layer):
            names.setdefault(id(value), attribute)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, keras.layers.Layer):
                    names.setdefault(id(item), f"{attribute}/{i}")
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, keras.layers.Layer):
                    names.setdefault(id(item), f"{attribute}/{key}")
    return names


def slot_entries(optimizer: Any, model_entries: list[Entry]) -> list[Entry]:
    """Give the slots of hvdtrain's optimizers, or all variables of another one, as entries."""
    if not hasattr(optimizer, "slots"):
        own = (optimizer.learning_rate, optimizer.iterations)
        return [Entry(v.path, v) for v in optimizer.variables if all(v is not known for known in own)]
    by_variable = {id(entry.variable): entry.path for entry in model_entries}
    return [
        Entry(f"{slot}/{by_variable[id(parameter)]}", variable)
        for slot, variables in optimizer.slots.items()
        for parameter, variable in zip(optimizer._trainable_variables, variables, strict=True)
    ]
