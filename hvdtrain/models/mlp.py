"""A multi-layer perceptron: flattened inputs, dense layers with SiLU, logits.

Inputs are (batch, ..input_shape), outputs (batch, classes) logits. With its default sizes it has
269,322 parameters for 28x28 images in 10 classes.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.models.block import Block


def torch_model(input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (256, 256)) -> Any:
    """Return the PyTorch model for samples of a shape, with hidden layers of these widths."""
    from torch import nn

    widths = [math.prod(input_shape), *hidden]

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))
            self.logits = nn.Linear(widths[-1], classes)

        def forward(self, inputs: Any) -> Any:
            x = inputs.flatten(1)
            for layer in self.hidden:
                x = nn.functional.silu(layer(x))
            return self.logits(x)

    return MLP()


def torch_blocks(model: Any) -> list[Any]:
    """Return the blocks of a PyTorch model: one for each dense layer."""
    from torch import nn

    def hidden(layer: Any) -> Block:
        return Block(lambda x: nn.functional.silu(layer(x.flatten(1))), layer)

    return [*map(hidden, model.hidden), Block(lambda x: model.logits(x.flatten(1)), model.logits)]


def tf_blocks(model: Any) -> list[Any]:
    """Return the blocks of a Keras model: one for each dense layer."""
    flatten, *others = model.layers[1:]
    first, *dense = [layer for part in others for layer in getattr(part, "layers", [part])]
    return [Block(lambda x: first(flatten(x)), first), *dense]


def tf_model(input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (256, 256)) -> Any:
    """Return the Keras twin; the arguments are those of :func:`torch_model`."""
    import keras
    from keras import layers

    inputs = keras.Input(tuple(input_shape))
    x = layers.Flatten()(inputs)
    if hidden:
        dense = [layers.Dense(width, activation="silu", name=str(i)) for i, width in enumerate(hidden)]
        x = keras.Sequential(dense, name="hidden")(x)
    return keras.Model(inputs, layers.Dense(classes, name="logits")(x))
