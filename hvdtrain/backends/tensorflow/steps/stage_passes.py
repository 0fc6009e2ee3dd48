"""A stage of a split model in TensorFlow: blocks, messages and passes; ``torch/`` has the same."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.objective.losses import Values
from hvdtrain.backends.pipeline.checks import uses_another_stage
from hvdtrain.backends.pipeline.messages import Bytes, Message, SentTensor
from hvdtrain.backends.pipeline.pipeline import Call, StagePassesBase
from hvdtrain.backends.tensorflow.functions import phase_of_layers, run_compiled
from hvdtrain.backends.tensorflow.objective.losses import masks_within
from hvdtrain.backends.tensorflow.probes import state_kept
from hvdtrain.backends.tensorflow.state.model_state import ModelState
from hvdtrain.backends.tensorflow.task_model import cast_outputs_to_fp32
from hvdtrain.errors import TaskError
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
    tensors = filter(tf.is_tensor, tf.nest.flatten(value))
    return [tensor for tensor in tensors if tensor.dtype.is_floating or tensor.dtype.is_complex]


class StageModel(keras.Model):
    """The layers of the blocks of one stage, which are called one after the other."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        super().__init__(name="stage")
        layers = {id(layer): layer for block in blocks for layer in parts_of(block, keras.Layer)}
        self.parts = list(layers.values())
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
    functional = model._functional
    if functional is None:
        return [first, *others]
    # of the type that the model's input says
    return [Block(lambda x: first(functional._standardize_inputs(x)[0]), first), *others]


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


def outputs_of(
    model: keras.Model, blocks: Sequence[Any], call: Call, training: bool, in_blocks: bool
) -> list[Any]:
    """Return what a model computes, or its blocks one after the other; nothing else changes."""
    arguments, named = call
    with state_kept(model), phase_of_layers(training):
        if in_blocks:
            found = called_in_order(blocks, arguments, named)
        else:
            found = model(*arguments, **named, training=training)
        return [np.asarray(value) for value in tf.nest.flatten(found)]


class StagePasses(StagePassesBase):
    """What a worker computes of the micro-batches of a step: compiled functions for each kind of pass."""

    def __init__(self, step: Any, whole: Any) -> None:
        super().__init__(step, whole)
        self._model = step.computation.model
        self._parameters = [field.variable.value for field in step.parts.trainable]
        self.gradients: list[Tensor] | None = None
        self._seen: Any = ()  # what evaluating the last micro-batch gave to metrics of a whole evaluation
        functions = {
            "forward": self._computed,
            "loss": self._trace_loss,
            "evaluate": lambda call: self._called_in(False, call),
            "evaluate_loss": self._trace_evaluate_loss,
            "add": lambda one, other: [a + b for a, b in zip(one, other, strict=True)],
        }
        self._functions = {what: tf.function(one, autograph=False) for what, one in functions.items()}

    sent, received = staticmethod(to_message), staticmethod(from_message)
    weighted_sums = staticmethod(tf.linalg.matvec)

    def begin(self, batch: Any, training: bool) -> None:
        """Begin a step, or the evaluation of a batch."""
        super().begin(batch, training)
        self.gradients, self._seen = None, ()

    def forward(self, place: int, call: Call) -> Any:
        """Return the outputs of a call, and keep them with what the stage was given."""
        given = self._differentiated(call)
        with tf.GradientTape() as tape:
            tape.watch(given)
            outputs = self._run("forward", call, self.counted(place)[1], self._seeds(place))
        self._kept[place] = tape, float_tensors(outputs), given
        return outputs

    def backward(self, place: int, gradients: Any) -> list[Tensor]:
        """Add a micro-batch's part to the gradients; return the gradients of what the stage was given."""
        tape, outputs, given = self._kept.pop(place)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
        return self._added(*self._gradients(tape, [o for o, _ in pairs], [g for _, g in pairs], given))

    def compute_loss(self, place: int, call: Call) -> list[Tensor]:
        """Do both passes of a micro-batch in the last stage."""
        counted = self.counted(place)
        found, passed, rows = self._run("loss", call, *counted, self._seeds(place))
        self._add(rows, counted[1])
        return self._added(found, passed)

    def evaluate(self, place: int, call: Call) -> Any:
        """Return the outputs of a call; in the last stage, take in the metrics."""
        if not self._layout.is_last_stage:
            return self._run("evaluate", call)
        arrays, weights, _ = self.counted(place)
        rows, self._seen = self._run("evaluate_loss", call, arrays, weights)
        self._add(rows, weights)
        return None

    def taken(self) -> Any:
        """Return what the last micro-batch gave to metrics of a whole evaluation, in the last stage."""
        return masks_within(*self._seen) if self._seen else ()

    def _run(self, what: str, *arguments: Any) -> Any:
        return run_compiled(self._functions[what], *arguments)

    def _seeds(self, place: int) -> Tensor:
        return self._computation.seeds(self._batch.step, place)

    def _differentiated(self, call: Call) -> list[Tensor]:
        """Return the tensors that a stage was given whose gradients the stage before needs."""
        return [] if self._layout.is_first_stage else float_tensors(call)

    def _trace_loss(
        self, call: Any, arrays: Any, weights: Tensor, gradient_weights: Tensor, seeds: Tensor
    ) -> Any:
        given = self._differentiated(call)
        self._set_seeds(seeds)
        with tf.GradientTape() as tape:
            tape.watch(given)
            losses, own, rows = self._values_of(call, arrays, weights, training=True)
        scaled = self._update.scale(gradient_weights)
        scaled = scaled if own is None else scaled * own
        return *self._gradients(tape, [losses], [scaled], given), tf.stop_gradient(rows)

    def _trace_evaluate_loss(self, call: Any, arrays: Any, weights: Tensor) -> Any:
        rows = self._values_of(call, arrays, weights, training=False).rows
        return rows, self._computation.evaluation.take()

    def _values_of(
        self, call: Any, arrays: Mapping[str, Tensor], weights: Tensor, training: bool
    ) -> Values[Tensor]:
        """Return losses and values of the samples of a micro-batch, in the last stage, while traced."""
        computation = self._computation
        computed = cast_outputs_to_fp32(partial(self._model.call, *call[0], **call[1]), computation.precision)
        self._called.run = lambda *_, **__: computed()
        computation.called = self._called
        values: Values[Tensor] = computation.per_sample(arrays, weights, training)
        self._check_no_added_loss()
        self.forms[training] = computation.names, computation.weighted
        return values

    def _check_no_added_loss(self) -> None:
        """Check that the layers of this stage, which have just been called, add nothing to the loss."""
        if self._model.losses:
            raise TaskError(
                "layers of the model add losses of their own (regularizers or add_loss), which stages cannot "
                "add up",
                "Use weight_decay in place of regularizers, or leave stages out.",
            )

    def _gradients(
        self, tape: tf.GradientTape, outputs: list[Tensor], weights: list[Tensor], given: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the stage's parameters, and of what it was given."""
        sources, count = [*self._parameters, *given], len(self._parameters)
        found = tape.gradient(outputs, sources, weights) if outputs else [None] * len(sources)
        own, self._computation.unused = self._update.fill_in_unused(found[:count])
        return own, found[count:]

    def _computed(self, call: Any, weights: Tensor, seeds: Tensor) -> Any:
        """Return the outputs of the stage in training."""
        self._set_seeds(seeds)
        self._computation.batch_norm.weights = weights
        self._model._clear_losses()
        outputs = self._called_in(True, call)
        self._check_no_added_loss()
        return outputs

    def _called_in(self, training: bool, call: Any) -> Any:
        """Return the outputs of the stage, with tensors in place of numbers; a mask would be lost."""
        with phase_of_layers(training):
            outputs = self._model.call(*call[0], **call[1])
        if any(getattr(t, "_keras_mask", None) is not None for t in tf.nest.flatten(outputs)):
            raise TaskError(
                "a block of the model returns a tensor with a mask, which is not passed to the next stage",
                "Let a layer such as keras.layers.Masking, or an embedding with mask_zero, be in one stage "
                "with the layers that use its mask (stage_cuts), or pass the mask as a tensor of its own.",
            )
        return tf.nest.map_structure(
            lambda part: tf.convert_to_tensor(part) if isinstance(part, bool | int | float) else part, outputs
        )

    def _set_seeds(self, seeds: Tensor) -> None:
        for i, state in enumerate(self._computation.seed_states):
            state.assign(seeds[i])

    def counted(self, place: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return a micro-batch without padding, with its weights and gradient weights."""
        return self._computation.counted(self._batch, place)

    def _added(self, found: list[Tensor], passed: list[Tensor]) -> list[Tensor]:
        """Add a micro-batch's part to the gradients; return those of what the stage was given."""
        self.gradients = found if self.gradients is None else self._functions["add"](self.gradients, found)
        return passed
