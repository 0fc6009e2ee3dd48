"""Models of Keras divided into blocks and stages; ``torch/stages/model.py`` does so for PyTorch."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.pipeline.checks import (
    Call,
    check_outputs,
    given_blocks,
    gives_blocks,
    has_no_part,
    uses_another_stage,
)
from hvdtrain.backends.pipeline.messages import Bytes, Message, pack, unpack
from hvdtrain.backends.tensorflow.functions import phase_of_layers
from hvdtrain.backends.tensorflow.probes import state_kept
from hvdtrain.backends.tensorflow.state.model_state import ModelState
from hvdtrain.errors import TaskError
from hvdtrain.models.block import Block, called_in_order, parts_of

Tensor = Any
Variable = Any

_REPEATS = 3  # of which the fastest is taken


def to_message(value: Any) -> Message:
    """Return nested tensors as a message; they may be on any device.

    Raises:
        TaskError: If there is something that cannot be sent.
    """
    return pack(value, tf.is_tensor, _describe)


def from_message(message: Message) -> Any:
    """Return the nested tensors of a message."""
    return unpack(message, _make)


def float_tensors(value: Any) -> list[Tensor]:
    """Return the tensors within a value that can have a gradient, in order."""
    return [
        t for t in tf.nest.flatten(value) if tf.is_tensor(t) and (t.dtype.is_floating or t.dtype.is_complex)
    ]


def _describe(tensor: Tensor) -> tuple[Any, Bytes]:
    array = np.ascontiguousarray(tf.convert_to_tensor(tensor).numpy())
    return (tensor.dtype.name, list(tensor.shape)), array.reshape(-1).view(np.uint8)


def _make(description: Any, buffer: Bytes) -> Tensor:
    kind, shape = description
    return tf.convert_to_tensor(buffer.view(tf.as_dtype(kind).as_numpy_dtype).reshape(shape))


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


class Called:
    """What stands for the whole model when a stage computes the loss.

    Args:
        model: the model; how it is called follows from its symbolic inputs or its ``call``.

    Attributes:
        run: is called with what the model is called with.
        stage: the layers of the stage, whose losses count as the model's.
    """

    run: Callable[..., Any]

    def __init__(self, model: keras.Model) -> None:
        self.stage = StageModel([])
        structure, tensors = getattr(model, "input", None), getattr(model, "inputs", None)
        if isinstance(tensors, list):
            made = [keras.KerasTensor(tensor.shape, tensor.dtype, name=tensor.name) for tensor in tensors]
            named = dict(zip(structure, made, strict=True)) if isinstance(structure, Mapping) else made
            self.__wrapped__ = SimpleNamespace(input=named, inputs=made)
        else:
            self.__wrapped__ = SimpleNamespace(call=model.call)

    def __call__(self, *arguments: Any, training: bool | None = None, **named: Any) -> Any:
        """Compute the stage."""
        return self.run(*arguments, **named)

    def _flatten_layers(self) -> list[Any]:
        layers: list[Any] = self.stage._flatten_layers()
        return layers

    def _clear_losses(self) -> None:
        self.stage._clear_losses()

    @property
    def losses(self) -> list[Tensor]:
        """The losses that the layers of the stage add."""
        losses: list[Tensor] = self.stage.losses
        return losses

    def __getattr__(self, name: str) -> NoReturn:
        raise has_no_part(name, model_has_it=not name.startswith("_"))


def check_it_draws_nothing(once: Any, again: Any) -> None:
    """Check that a loss called the model twice alike: its first stage and its last one must do so.

    Raises:
        TaskError: If it did not.
    """
    pairs = zip(tf.nest.flatten(once), tf.nest.flatten(again), strict=True)
    if not all(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind in "fc") for a, b in pairs):
        raise TaskError(
            "tf_loss draws random numbers for what it calls the model with; with stages, the last one "
            "computes the loss anew and would draw others",
            "Draw them in the dataset or in a layer of the model, or leave stages out.",
            everywhere=True,
        )


def blocks_of(task: Any, model: keras.Model) -> list[Any]:
    """Return the blocks of a model: what the task gives, or the layers of a sequential one.

    Raises:
        TaskError: If the model cannot be divided.
    """
    if not gives_blocks(task, "tf") and isinstance(model, keras.Sequential):
        first, *others = model.layers
        return [Block(lambda x: first(_as_input(model, x)), first), *others]
    return given_blocks(task, model, "tf", (Sequence,))


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


def seconds_of(blocks: Sequence[Any], model: keras.Model, call: Call) -> list[float]:
    """Return how long the forward pass of each block takes for a micro-batch, and change nothing."""
    found: list[float] = []
    with state_kept(model), phase_of_layers(training=True):
        for block in blocks:
            function = tf.function(partial(_called, block), autograph=False).get_concrete_function(*call)
            ends = []
            for _ in range(_REPEATS):
                begun = time.perf_counter()
                outputs = function(*call)
                for tensor in tf.nest.flatten(outputs):
                    tensor.numpy()
                ends.append(time.perf_counter() - begun)
            found.append(min(ends))
            call = (outputs,), {}
    return found


def _called(block: Any, arguments: Any, named: Any) -> Any:
    return block(*arguments, **named)
