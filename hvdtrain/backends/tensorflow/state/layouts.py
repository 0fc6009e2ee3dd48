"""Which portable arrays the variables of Keras layers become: paths, roles, layouts: Keras's own."""

import re
from collections.abc import Iterator
from typing import Any

import keras

Layer = Any
Variable = Any

_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
# what Keras calls a variable that was given no name
_NO_NAME = re.compile(r"variable(_\d+)?")


def role(layer: Layer, variable: Variable) -> str:
    """Return the last part of a variable's portable name: its name in the layer."""
    if isinstance(layer, keras.layers.RMSNormalization) and variable.name == "scale":
        return "gamma"
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    if _NO_NAME.fullmatch(variable.name) or sum(other.name == variable.name for other in own) > 1:
        for attribute, value in vars(layer).items():
            if value is variable:
                return attribute
            if attribute.startswith("_"):  # what Keras keeps for itself
                continue
            pairs = enumerate(value) if isinstance(value, list | tuple) else ()
            for key, part in value.items() if isinstance(value, dict) else pairs:
                if part is variable:
                    return f"{attribute}/{key}"
    return str(variable.name)


def portable_shape(layer: Layer, variable: Variable) -> tuple[int, ...]:
    """Return the shape of a variable's portable array, which has its values in the same order."""
    shape = tuple(variable.shape)
    if isinstance(layer, _CONVOLUTIONS) and variable.name == "kernel":
        *spatial, width, filters = shape
        if width == 1 and layer.groups > 1:  # depthwise: (..spatial, in, multiplier)
            return (*spatial, layer.groups, filters // layer.groups)
    return shape


def children(layer: Layer) -> Iterator[tuple[str, Layer]]:
    """Return the layers right below a layer, each with its names: more than one where it is shared."""
    below = [child for child in layer._layers if not isinstance(child, keras.layers.InputLayer)]
    if isinstance(layer, keras.layers.RNN):
        yield from (("", child) for child in below)  # PyTorch has no cell inside a layer
    elif isinstance(layer, keras.layers.StackedRNNCells):
        yield from ((str(i), child) for i, child in enumerate(layer.cells))
    elif isinstance(layer, (keras.Sequential, *_ATTENTION)) or type(layer).__name__ == "Functional":
        yield from ((child.name, child) for child in below)
    else:
        held = {id(child): child for child in below}
        # those of a name with _self_ are Keras's and TensorFlow's own bookkeeping
        kept = [(n, v) for n, v in vars(layer).items() if n != "_layers" and not n.startswith("_self_")]
        named = [(n, held[key]) for one in kept for n, key in _places(*one) if key in held]
        found = {id(child) for _, child in named}
        yield from named
        yield from ((child.name, child) for child in below if id(child) not in found)


def _places(name: str, value: Any) -> Iterator[tuple[str, int]]:
    if isinstance(value, keras.layers.Layer):
        yield name, id(value)
    elif isinstance(value, list | tuple | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(f"{name}/{key}", item)
