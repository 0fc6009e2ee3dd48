"""Models of Keras divided into blocks and stages; ``torch/stages/model.py`` does so for PyTorch."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from hvdtrain.backends.objective.objective import Objective
from hvdtrain.backends.pipeline.checks import (
    check_outputs,
    first_call,
    given_blocks,
    gives_blocks,
    has_no_part,
    uses_another_stage,
    wrong_blocks,
)
from hvdtrain.backends.pipeline.messages import Bytes, Message, pack, unpack
from hvdtrain.backends.tensorflow.functions import phase_of_layers
from hvdtrain.backends.tensorflow.probes import state_kept
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.errors import TaskError
from hvdtrain.models.block import Block, called_in_order, parts_of

Tensor = Any


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


Variable = Any

_REPEATS = 3  # of which the fastest is taken
_WAITING = "uninitialized_variables"  # Keras's list of variables without memory


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
    """What stands for the whole model when a stage computes the loss: its call computes the stage.

    Args:
        run: is called with what the model is called with.
        form: what says how the model is called.
        model: the layers of the stage.
    """

    def __init__(self, run: Callable[..., Any], form: Any, model: StageModel) -> None:
        self._run = run
        self.__wrapped__ = form
        self._model = model

    def __call__(self, *arguments: Any, training: bool | None = None, **named: Any) -> Any:
        """Compute the stage."""
        return self._run(*arguments, **named)

    def _flatten_layers(self) -> list[Any]:
        layers: list[Any] = self._model._flatten_layers()
        return layers

    def _clear_losses(self) -> None:
        self._model._clear_losses()

    @property
    def losses(self) -> list[Tensor]:
        """The losses that the layers of the stage add."""
        losses: list[Tensor] = self._model.losses
        return losses

    def __getattr__(self, name: str) -> NoReturn:
        raise has_no_part(name, model_has_it=not name.startswith("_"))


def call_of(
    objective: Objective, batch: Mapping[str, Any], form: Any, model: StageModel
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which an objective calls the model for a micro-batch.

    Raises:
        TaskError: If it does not call the model.
    """
    return first_call(lambda run: objective(Called(run, form, model), batch))


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


def form_of(model: keras.Model) -> Any:
    """Return what says how a model is called, without the model: its symbolic inputs or its ``call``."""
    structure, tensors = getattr(model, "input", None), getattr(model, "inputs", None)
    if not isinstance(tensors, list):
        return SimpleNamespace(call=model.call)
    made = [keras.KerasTensor(tensor.shape, tensor.dtype, name=tensor.name) for tensor in tensors]
    named = dict(zip(structure, made, strict=True)) if isinstance(structure, Mapping) else made
    return SimpleNamespace(input=named, inputs=made)


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


def owners_of(fields: Sequence[Field], stages: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Return for each portable array the stages that have it.

    Raises:
        TaskError: If no stage has one.
    """
    of_stages = [tensors_of(blocks) for blocks in stages]
    owners = []
    for field in fields:
        having = [stage for stage, own in enumerate(of_stages) if id(field.variable) in own]
        if not having:
            raise wrong_blocks("tf", f"no block has the model's {field.variable.path}")
        owners.append(having)
    return owners


def free_others(whole: ModelState, blocks: Sequence[Any]) -> None:
    """Free the memory of all variables of a model but those of some blocks; whoever uses them fails."""
    own = tensors_of(blocks)
    for field in whole.fields:
        if id(field.variable) not in own:
            field.variable._value = None
            field.variable._initializer = partial(_not_here, field.path)


def _not_here(path: str, *_: Any, **__: Any) -> NoReturn:
    raise uses_another_stage(path)


def check_blocks(
    blocks: Sequence[Any], model: keras.Model, arguments: Sequence[Any], named: Mapping[str, Any]
) -> str:
    """Check that blocks compute what their model does; return what they do otherwise in training, as text.

    Raises:
        TaskError: If they compute something else in evaluation.
    """

    def outputs(training: bool, computed: Callable[..., Any]) -> list[Any]:
        with state_kept(model), phase_of_layers(training):
            return [np.asarray(value) for value in tf.nest.flatten(computed(training))]

    return check_outputs(
        "tf",
        partial(outputs, computed=lambda training: model(*arguments, **named, training=training)),
        partial(outputs, computed=lambda _: called_in_order(blocks, arguments, named)),
    )


def seconds_of(
    blocks: Sequence[Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    """Return how long the forward pass of each block takes for a micro-batch, and both passes."""
    forward, both = [], []
    value: Any = None
    with phase_of_layers(training=True):
        for place, block in enumerate(blocks):
            call = (tuple(arguments), dict(named)) if place == 0 else ((value,), {})
            of_one, value = _fastest(_timed_forward(block), call)
            of_two, _ = _fastest(_timed_passes(block), call)
            forward.append(of_one)
            both.append(of_two)
    return forward, both


def _fastest(function: Callable[..., Any], call: Any) -> tuple[float, Any]:
    """Return how long a function of a block takes, at least, and what it returns."""
    concrete = tf.function(function, autograph=False).get_concrete_function(*call)
    best, value = float("inf"), None
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        value = concrete(*call)
        for tensor in tf.nest.flatten(value):
            tensor.numpy()
        best = min(best, time.perf_counter() - begun)
    return best, value


def _timed_forward(block: Any) -> Callable[..., Any]:
    return lambda arguments, named: block(*arguments, **named)


def _timed_passes(block: Any) -> Callable[..., Any]:
    variables = [v.value for layer in parts_of(block, keras.Layer) for v in layer.trainable_variables]

    def run(arguments: Any, named: Any) -> Any:
        given = float_tensors((arguments, named))
        with tf.GradientTape() as tape:
            tape.watch(given)
            of_loss = float_tensors(block(*arguments, **named))
        found = tape.gradient(of_loss, [*variables, *given]) if of_loss else []
        # so that nothing of it is left out
        return tf.add_n(
            [tf.zeros(()), *(tf.cast(tf.reduce_sum(g), tf.float32) for g in found if g is not None)]
        )

    return run


def bytes_of(blocks: Sequence[Any]) -> list[float]:
    """Return the bytes of each block's variables, those that several blocks have in each of them."""
    return [
        float(sum(np.prod(v.shape) * tf.as_dtype(v.dtype).size for v in tensors_of([block]).values()))
        for block in blocks
    ]


@contextmanager
def parameters_without_memory() -> Iterator[Callable[[], bool]]:
    """Return a context in which layers are made whose variables have shapes and initializers, and no memory.

    Where a value is used, the initializer computes it, and it is freed again.

    Yields:
        Returns whether something has given a variable a value, which is lost: its initializer stays. The
        states of random generators do not count.
    """
    scope = keras.StatelessScope(initialize_variables=False)
    waiting: list[Variable] = []

    def are_changed() -> bool:
        return any(id(v) in scope.state_mapping for v in waiting if v.name != "seed_generator_state")

    before = global_state.get_global_attribute(_WAITING)
    global_state.set_global_attribute(_WAITING, waiting)
    try:
        with scope:
            yield are_changed
    finally:
        # Keras would give them memory at the end of its next scope
        global_state.set_global_attribute(_WAITING, before)


def give_memory(blocks: Sequence[Any]) -> None:
    """Give the variables of blocks memory that have none, and the values of their initializers."""
    for variable in tensors_of(blocks).values():
        if variable._value is None:
            variable._deferred_initialize()
