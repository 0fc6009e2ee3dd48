"""The blocks of a split model, as a task gives them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Part = TypeVar("Part")


class Block:
    """A block of a split model that is a function of several modules or layers.

    Most blocks are modules or layers themselves. This one is for what stands between them in the model's own
    forward pass::

        def torch_blocks(self, model):
            return [hvdtrain.Block(model.embed, model.tokens, model.positions), *model.blocks, model.head]

    Args:
        function: takes what the block before returns; the first block of a model takes what the model takes.
        *parts: the modules or layers whose parameters and statistics it uses.

    Attributes:
        function: see above.
        parts: see above.
    """

    def __init__(self, function: Callable[..., Any], *parts: Any) -> None:
        self.function = function
        self.parts: Sequence[Any] = parts

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Compute the block."""
        return self.function(*arguments, **named)


def keras_ends(model: Any, *tensors: Any) -> Any:
    """Keep in a functional Keras model the tensors between which its repeated blocks are; return it."""
    model.ends_of_blocks = lambda: tensors  # a function, which Keras and TensorFlow do not track
    return model


def keras_blocks(model: Any, inner: Sequence[Any]) -> list[Any]:
    """Return the blocks of a model of :func:`keras_ends`: the repeated ones, and what is around them."""
    import keras

    entering, leaving = model.ends_of_blocks()
    return [keras.Model(model.input, entering), *inner, keras.Model(leaving, model.output)]


def keras_layers(model: Any, name: str) -> list[Any]:
    """Return the layers of a model within a Keras model, without its inputs."""
    import keras

    return [layer for layer in model.get_layer(name).layers if not isinstance(layer, keras.layers.InputLayer)]


def parts_of(block: Any, kind: type[Part]) -> list[Part]:
    """Return the modules or layers of a block, which may be one itself, a function or a ``Block``."""
    found = block.parts if isinstance(block, Block) else [block]
    return [part for part in found if isinstance(part, kind)]


def called_in_order(blocks: Sequence[Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the outputs of the last of some blocks; the first one is given the arguments."""
    first, *others = blocks
    value = first(*arguments, **named)
    for block in others:
        value = block(value)
    return value
