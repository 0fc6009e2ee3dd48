"""Models of Keras divided into blocks and stages; ``torch/stages/model.py`` does so for PyTorch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.pipeline.checks import check_outputs, uses_another_stage
from hvdtrain.backends.pipeline.messages import Bytes, Message, SentTensor
from hvdtrain.backends.pipeline.pipeline import Call
from hvdtrain.backends.tensorflow.functions import phase_of_layers
from hvdtrain.backends.tensorflow.probes import state_kept
from hvdtrain.backends.tensorflow.state.model_state import ModelState
from hvdtrain.models.block import Block, called_in_order, parts_of

Tensor = Any
Variable = Any


def to_message(value: Any) -> Message:
    """Return nested tensors as a message; they may be on any device."""
    buffers: list[Bytes] = []

    def sent(part: Any) -> Any:
        if not tf.is_tensor(part):
            return part
        array = np.ascontiguousarray(tf.convert_to_tensor(part).numpy())
        buffers.append(array.reshape(-1).view(np.uint8))
        return SentTensor(part.dtype.name, list(part.shape))

    return Message(tf.nest.map_structure(sent, value), buffers)


def from_message(message: Message) -> Any:
    """Return the nested tensors of a message."""
    buffers = iter(message.buffers)

    def made(part: Any) -> Any:
        if not isinstance(part, SentTensor):
            return part
        kind = tf.as_dtype(part.dtype).as_numpy_dtype
        return tf.convert_to_tensor(next(buffers).view(kind).reshape(part.shape))

    return tf.nest.map_structure(made, message.description)


def float_tensors(value: Any) -> list[Tensor]:
    """Return the tensors within a value that can have a gradient, in order."""
    return [
        t for t in tf.nest.flatten(value) if tf.is_tensor(t) and (t.dtype.is_floating or t.dtype.is_complex)
    ]


class StageModel(keras.Model):
    """The layers of the blocks of one stage, which are called one after the other.

    Args:
        blocks: layers, functions or ``Block``.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        super().__init__(name="stage")
        self.parts = list(
            {id(layer): layer for block in blocks for layer in parts_of(block, keras.Layer)}.values()
        )
        self.blocks = tuple(blocks)
        self.built = True

    def call(self, *arguments: Any, **named: Any) -> Any:
        """Return the outputs of the last block; the first one is given the arguments."""
        return called_in_order(self.blocks, arguments, named)


def layers_of(model: keras.Model) -> list[Any] | None:
    """Return the blocks of a sequential model, its layers; None of another one."""
    if not isinstance(model, keras.Sequential):
        return None
    first, *others = model.layers
    return [Block(lambda x: first(_as_input(model, x)), first), *others]


def _as_input(model: keras.Sequential, value: Any) -> Tensor:
    """Return what a sequential model gives its first layer: the type that its input says."""
    functional = model._functional
    return value if functional is None else functional._standardize_inputs(value)[0]


def tensors_of(blocks: Sequence[Any]) -> dict[int, Variable]:
    """Return the variables of blocks by their identity."""
    return {id(v): v for block in blocks for layer in parts_of(block, keras.Layer) for v in layer.variables}


def free_others(whole: ModelState, blocks: Sequence[Any]) -> None:
    """Free the memory of all variables of a model but those of some blocks; whoever uses them fails."""
    own = tensors_of(blocks)
    for field in whole.fields:
        if id(field.variable) not in own:
            field.variable._value = None
            field.variable._initializer = partial(_not_here, field.path)


def _not_here(path: str, *_: Any, **__: Any) -> NoReturn:
    raise uses_another_stage(path)


def check_blocks(blocks: Sequence[Any], model: keras.Model, call: Call) -> str:
    """Check that blocks compute what their model does; return what they do otherwise in training, as text.

    Raises:
        TaskError: If they compute something else in evaluation.
    """
    arguments, named = call

    def outputs(training: bool, computed: Callable[..., Any]) -> list[Any]:
        with state_kept(model), phase_of_layers(training):
            return [np.asarray(value) for value in tf.nest.flatten(computed(training))]

    return check_outputs(
        "tf",
        partial(outputs, computed=lambda training: model(*arguments, **named, training=training)),
        partial(outputs, computed=lambda _: called_in_order(blocks, arguments, named)),
    )
