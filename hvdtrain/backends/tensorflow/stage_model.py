"""Models of Keras divided into blocks and stages; ``torch/stage_model.py`` does so for PyTorch."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional

from hvdtrain.backends.activation_checkpointing import MARK
from hvdtrain.backends.objective import Objective
from hvdtrain.backends.pipeline.checks import cannot_be_cut, uses_another_stage, wrong_blocks
from hvdtrain.backends.pipeline.staged import (
    FirstCall,
    differs_in_training,
    has_no_part,
    no_call,
    raise_call,
)
from hvdtrain.backends.tensorflow.dry_run import state_kept
from hvdtrain.backends.tensorflow.functions import phase_of_layers
from hvdtrain.backends.tensorflow.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.stage_messages import float_tensors
from hvdtrain.block import Block
from hvdtrain.errors import TaskError

Tensor = Any
Variable = Any
Key = tuple[Any, ...]

_REPEATS = 3  # of which the fastest is taken
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5  # by which outputs of blocks may differ from the model's


class StageModel(keras.Model):
    """The layers of the blocks of one stage, which are called one after the other.

    Args:
        blocks: layers, functions or ``Block``.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        super().__init__(name="stage")
        self.parts = list({id(layer): layer for block in blocks for layer in parts_of(block)}.values())
        self.blocks = tuple(blocks)
        self.built = True

    def call(self, *arguments: Any, **named: Any) -> Any:
        """Return the outputs of the last block; the first one is given the arguments."""
        return _called(self.blocks, arguments, named)


def _called(blocks: Sequence[Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the outputs of the last of some blocks; the first one is given the arguments."""
    first, *others = blocks
    value = first(*arguments, **named)
    for block in others:
        value = block(value)
    return value


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
    try:
        objective(Called(raise_call, form, model), batch)
    except FirstCall as call:
        return call.arguments, call.named
    raise no_call()


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
    """Return the blocks of a model: what the task gives, or what a functional one can be divided into.

    Raises:
        TaskError: If the model cannot be divided.
    """
    if not hasattr(task, "tf_blocks"):
        functional = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else model
        if isinstance(functional, Functional):
            return _divided(functional)
        raise cannot_be_cut("tf", f"a {type(model).__name__}")
    try:
        given = task.tf_blocks(model)
    except Exception as error:
        problem = f"it fails for the model, a {type(model).__name__}: {type(error).__name__}: {error}"
        raise wrong_blocks("tf", problem) from error
    blocks = list(given) if isinstance(given, Sequence) else []
    wrong = next((block for block in blocks if not callable(block)), None)
    if not blocks or wrong is not None:
        found = repr(given) if not blocks else f"a {type(wrong).__name__} among them"
        raise wrong_blocks("tf", f"it must give a list of layers or of hvdtrain.Block, found {found}")
    return blocks


def parts_of(block: Any) -> list[Any]:
    """Return the layers of a block."""
    found = block.parts if isinstance(block, Block) else [block]
    return [layer for layer in found if isinstance(layer, keras.Layer)]


def tensors_of(blocks: Sequence[Any]) -> dict[int, Variable]:
    """Return the variables of blocks by their identity."""
    return {id(v): v for block in blocks for layer in parts_of(block) for v in layer.variables}


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
            field.variable._initializer = _not_here


def _not_here(*_: Any, **__: Any) -> NoReturn:
    raise uses_another_stage()


def check_blocks(
    blocks: Sequence[Any], model: keras.Model, arguments: Sequence[Any], named: Mapping[str, Any]
) -> str:
    """Check that blocks compute what their model does; return what they do otherwise in training, in words.

    Raises:
        TaskError: If they compute something else in evaluation.
    """
    for training in (False, True):
        with state_kept(model), phase_of_layers(training):
            expected = tf.nest.flatten(model(*arguments, **named, training=training))
        with state_kept(model), phase_of_layers(training):
            try:
                found = tf.nest.flatten(_called(blocks, arguments, named))
            except TaskError:
                raise
            except Exception as error:
                problem = f"the blocks cannot be called one after the other: {error}"
                raise wrong_blocks("tf", problem) from error
        same = len(expected) == len(found) and all(map(_is_close, expected, found))
        if not same and training:
            return differs_in_training()
        if not same:
            raise wrong_blocks("tf", "the blocks compute other outputs than the model for the first batch")
    return ""


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
    variables = [v.value for layer in parts_of(block) for v in layer.trainable_variables]

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


class _Step(NamedTuple):
    """One operation of a functional model, nested models being taken apart.

    Attributes:
        operation: the layer or operation.
        arguments: with which it is called, of symbolic tensors.
        prefix: what stands before the keys of these tensors.
        inputs: the keys of what it takes.
        outputs: the keys of what it returns.
        limit: how many tensors may lead over a cut beside it: as many as its model takes.
    """

    operation: Any
    arguments: Any
    prefix: Key
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    limit: int


def _divided(model: Functional) -> list[Any]:
    """Return the blocks between all places at which a functional model can be cut."""
    aliases: dict[Key, Key] = {}
    steps = list(_steps(model, (), aliases))

    def key(found: Key) -> Key:
        while found in aliases:
            found = aliases[found]
        return found

    given = [(id(tensor),) for tensor in model.inputs]
    results = [key((id(tensor),)) for tensor in model.outputs]
    last_use: dict[Key, int] = dict.fromkeys(results, len(steps))
    for place, step in enumerate(steps):
        for found in map(key, step.inputs):
            last_use[found] = max(last_use.get(found, 0), place)
    known, begin, entering = list(given), 0, list(given)
    blocks: list[Any] = []
    for place, step in enumerate(steps):
        known = [
            found
            for found in dict.fromkeys([*known, *map(key, step.outputs)])
            if last_use.get(found, -1) > place
        ]
        following = steps[place + 1].limit if place + 1 < len(steps) else 0
        is_end = place + 1 == len(steps)
        if is_end or len(known) <= max(step.limit, following):
            leaving = results if is_end else known
            part = steps[begin : place + 1]
            graph = _GraphBlock(
                part, entering, leaving, key, model if begin == 0 else None, model if is_end else None
            )
            layers = {id(s.operation): s.operation for s in part if isinstance(s.operation, keras.Layer)}
            blocks.append(Block(graph, *layers.values()))
            begin, entering = place + 1, list(known)
    return _without_idle(blocks)


def _without_idle(blocks: list[Any]) -> list[Any]:
    """Join blocks without weights to the block before them, the first to the next, so that each has some."""
    joined: list[list[Any]] = []
    is_idle = True
    for block in blocks:
        has_weights = any(layer.weights for layer in parts_of(block))
        if joined and (is_idle or not has_weights):
            joined[-1].append(block)
        else:
            joined.append([block])
        is_idle = is_idle and not has_weights
    return [_chained(chain) for chain in joined]


def _chained(chain: Sequence[Any]) -> Any:
    if len(chain) == 1:
        return chain[0]
    return Block(
        lambda *a, **k: _called(chain, a, k), *(layer for block in chain for layer in parts_of(block))
    )


def _steps(model: Functional, prefix: Key, aliases: dict[Key, Key]) -> Iterator[_Step]:
    """Yield the operations of a model in an order in which they can be computed."""
    limit = max(1, len(model.inputs))
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if not node.operation or node.is_input:
                continue
            inputs = tuple((*prefix, id(tensor)) for tensor in node.input_tensors)
            outputs = tuple((*prefix, id(tensor)) for tensor in node.outputs)
            inner = _nested(node)
            if inner is None:
                yield _Step(node.operation, node.arguments, prefix, inputs, outputs, limit)
                continue
            within = (*prefix, id(node))
            for outer, tensor in zip(inputs, inner.inputs, strict=True):
                own = (*within, id(tensor))
                yield _Step(_AsInput(tensor), None, prefix, (outer,), (own,), limit)
            yield from _steps(inner, within, aliases)
            for outer, tensor in zip(outputs, inner.outputs, strict=True):
                aliases[outer] = (*within, id(tensor))


def _nested(node: Any) -> Functional | None:
    """Return the model that a node calls, if it can be taken apart: if it is called with its inputs alone.

    A model that is marked as a block stays whole.
    """
    model = node.operation
    if getattr(model, MARK, False) is True:
        return None
    inner = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else model
    if not isinstance(inner, Functional) or type(model) not in (keras.Sequential, keras.Model, Functional):
        return None
    plain = all(value is None for value in keras.tree.flatten(node.arguments.kwargs))
    same = len(node.input_tensors) == len(inner.inputs) and len(node.arguments.args) == 1
    return inner if plain and same and len(node.outputs) == len(inner.outputs) else None


class _AsInput:
    """What a nested model does to what it is given: it has the type that its input says."""

    def __init__(self, tensor: Any) -> None:
        self._dtype = tensor.dtype

    def __call__(self, value: Tensor) -> Tensor:
        mask = keras.src.backend.get_keras_mask(value)
        found = keras.ops.convert_to_tensor(value, dtype=self._dtype)
        if mask is not None:
            keras.src.backend.set_keras_mask(found, mask)
        return found


class _GraphBlock:
    """Some operations of a functional model.

    Args:
        steps: the operations.
        entering: the keys of the tensors that it is given: one, or a list of several.
        leaving: those of the tensors that it returns, likewise.
        key: returns the key under which a tensor is computed.
        first: the model, if this is its first block, which is given what the model is.
        last: the model, if this is its last block, which returns what the model does.
    """

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        steps: Sequence[_Step],
        entering: Sequence[Key],
        leaving: Sequence[Key],
        key: Callable[[Key], Key],
        first: Functional | None,
        last: Functional | None,
    ) -> None:
        self._steps = list(steps)
        self._entering, self._leaving = list(entering), list(leaving)
        self._key = key
        self._first, self._last = first, last

    def __call__(self, value: Any) -> Any:
        if self._first is not None:
            given = self._first._standardize_inputs(value)
        else:
            given = [value] if len(self._entering) == 1 else list(value)
        values = dict(zip(self._entering, given, strict=True))
        for step in self._steps:
            if step.arguments is None:
                outputs = step.operation(values[self._key(step.inputs[0])])
            else:
                own = {found[-1]: values[self._key(found)] for found in step.inputs}
                arguments, named = step.arguments.fill_in(own)
                # a default of False, such as Dropout's, stands there as if it had been given
                if "training" in getattr(step.operation, "_call_context_args", ()):
                    named = {name: value for name, value in named.items() if name != "training"}
                outputs = step.operation(*arguments, **named)
            for found, output in zip(step.outputs, keras.tree.flatten(outputs), strict=True):
                values[found] = output
        results = [values[found] for found in self._leaving]
        if self._last is None:
            return results[0] if len(results) == 1 else results
        packed = keras.tree.pack_sequence_as(self._last._outputs_struct, results)
        return packed[0] if isinstance(packed, list | tuple) and len(packed) == 1 else packed


def _is_close(expected: Any, found: Any) -> bool:
    one, other = np.asarray(expected), np.asarray(found)
    if one.shape != other.shape:
        return False
    one, other = one.astype(np.float64), other.astype(np.float64)
    scale = float(np.abs(one).max(initial=0.0))
    return bool(np.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE * max(scale, 1e-30), equal_nan=True))
