"""The forward and backward passes of a stage in TensorFlow."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.pipeline.checks import several_calls
from hvdtrain.backends.pipeline.groups import Layout
from hvdtrain.backends.pipeline.messages import Message
from hvdtrain.backends.pipeline.stage_step import Form
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch
from hvdtrain.backends.tensorflow.computation import Computation
from hvdtrain.backends.tensorflow.functions import native, phase_of_layers, run_compiled
from hvdtrain.backends.tensorflow.objective.losses import Values, masks_within
from hvdtrain.backends.tensorflow.precision import cast_outputs_to_fp32
from hvdtrain.backends.tensorflow.stages.model import (
    Called,
    call_of,
    float_tensors,
    from_message,
    to_message,
)
from hvdtrain.errors import TaskError

Tensor = Any


class StagePasses:
    """What a worker computes of the micro-batches of a step: compiled functions for each kind of pass.

    Between its forward and its backward pass, a micro-batch takes the memory of what the stage was given: the
    backward pass computes the forward pass again. What that moves, such as the statistics of batch norm,
    moves once, in the backward pass.

    Args:
        computation: what steps compute; its model has the layers of this worker's stage.
        layout: the place of this worker.
        form: what says how the model is called.
        update: the update of the stage.

    Attributes:
        place: the micro-batch that ``evaluate`` computes next.
        sums: what the micro-batches add up to in the last stage: the weighted sums of loss and metrics.
        gradients: of each parameter of the stage, what the micro-batches add up to.
        last_values: the rows of loss and metrics of the last micro-batch, and its weights.
        forms: in training or not: the names of the sums and of those with weights, as last traced.
    """

    def __init__(self, computation: Computation, layout: Layout, form: Any, update: Any) -> None:
        self._computation, self._layout, self._update = computation, layout, update
        self._form = form
        self.forms: dict[bool, Form] = {}
        self._batch: TensorFlowBatch | None = None
        self._kept: dict[int, Any] = {}
        self._training = True
        self.place = 0
        self.sums: Tensor | None = None
        self.gradients: list[Tensor] | None = None
        self._seen: Any = ()  # what evaluating the last micro-batch gave to metrics of a whole evaluation
        self.last_values: tuple[Tensor, Tensor] | None = None
        model = computation.model
        left_out = {id(v) for v in (*computation.seed_states, *model.trainable_variables)}
        self._moving = [native(v) for v in model.variables if id(v) not in left_out]
        self._functions = {
            what: tf.function(function, autograph=False)
            for what, function in (
                ("forward", self._trace_forward),
                ("backward", self._trace_backward),
                ("loss", self._trace_loss),
                ("evaluate", self._trace_evaluate),
                ("evaluate_loss", self._trace_evaluate_loss),
                ("add", lambda one, other: [a + b for a, b in zip(one, other, strict=True)]),
            )
        }

    def begin(self, batch: TensorFlowBatch, training: bool) -> None:
        """Begin a step.

        Args:
            batch: its batch.
            training: whether the loss is that of training.
        """
        self._batch, self._training = batch, training
        self.place, self.sums, self.gradients, self._seen, self.last_values = 0, None, None, (), None
        self._kept.clear()

    def samples(self, place: int) -> int:
        """Return the number of samples that are computed of a micro-batch, which has no padding."""
        return len(self._counted(place)[1])

    def forward(self, place: int, received: Message | None) -> Message:
        """Compute the outputs for a micro-batch; keep what the stage was given."""
        call = self._kept[place] = self._call(place, received)
        return to_message(self._run("forward", call, self._weights(place), self._seeds(place)))

    def backward(self, place: int, received: Message) -> Message | None:
        """Add a micro-batch's part to the gradients; return the gradients of what the stage was given."""
        call = self._kept.pop(place)
        given = from_message(received)
        found, passed = self._run("backward", call, given, self._weights(place), self._seeds(place))
        self._add_gradients(found)
        return None if self._layout.is_first else to_message(list(passed))

    def compute_loss(self, place: int, received: Message | None) -> Message | None:
        """Do both passes of a micro-batch in the last stage."""
        call = self._call(place, received)
        arrays, weights, gradient_weights = self._counted(place)
        found, passed, rows = self._run("loss", call, arrays, weights, gradient_weights, self._seeds(place))
        self._add_gradients(found)
        self._add(rows, weights)
        return None if self._layout.is_first else to_message(list(passed))

    def evaluate(self, received: Message | None) -> Message | None:
        """Compute the outputs for a micro-batch; in the last stage, the metrics."""
        place, self.place = self.place, self.place + 1
        call = self._call(place, received)
        if not self._layout.is_last:
            return to_message(self._run("evaluate", call))
        arrays, weights, _ = self._counted(place)
        rows, self._seen = self._run("evaluate_loss", call, arrays, weights)
        self._add(rows, weights)
        return None

    def taken(self) -> Any:
        """Return what the last micro-batch gave to metrics of a whole evaluation, in the last stage."""
        return masks_within(*self._seen) if self._seen else ()

    def _run(self, what: str, *arguments: Any) -> Any:
        return run_compiled(self._functions[what], *arguments)

    def _trace_forward(self, call: Any, weights: Tensor, seeds: Tensor) -> Any:
        before = [variable.read_value() for variable in self._moving]
        outputs = self._computed(call, weights, seeds)
        with tf.control_dependencies([t for t in tf.nest.flatten(outputs) if tf.is_tensor(t)]):
            for variable, value in zip(self._moving, before, strict=True):
                variable.assign(value)
        return outputs

    def _trace_backward(self, call: Any, gradients: Sequence[Tensor], weights: Tensor, seeds: Tensor) -> Any:
        given = [] if self._layout.is_first else float_tensors(call)
        with tf.GradientTape() as tape:
            tape.watch(given)
            outputs = float_tensors(self._computed(call, weights, seeds))
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
        return self._gradients(tape, [o for o, _ in pairs], [g for _, g in pairs], given)

    def _trace_loss(
        self, call: Any, arrays: Any, weights: Tensor, gradient_weights: Tensor, seeds: Tensor
    ) -> Any:
        given = [] if self._layout.is_first else float_tensors(call)
        self._set_seeds(seeds)
        with tf.GradientTape() as tape:
            tape.watch(given)
            losses, own, rows = self._values_of(call, arrays, weights, training=True)
        scaled = self._update.scale(gradient_weights)
        scaled = scaled if own is None else scaled * own
        return *self._gradients(tape, [losses], [scaled], given), tf.stop_gradient(rows)

    def _trace_evaluate(self, call: Any) -> Any:
        with phase_of_layers(training=False):
            return self._without_masks(self._computation.model.call(*call[0], **call[1]))

    def _trace_evaluate_loss(self, call: Any, arrays: Any, weights: Tensor) -> Any:
        rows = self._values_of(call, arrays, weights, training=False).rows
        return rows, self._computation.evaluation.take()

    def _values_of(self, call: Any, arrays: Mapping[str, Tensor], weights: Tensor, training: bool) -> Values:
        """Return losses and values of the samples of a micro-batch, in the last stage, while that is traced.

        Args:
            call: what the stage is called with.
            arrays: the micro-batch.
            weights: of its samples.
            training: whether the loss is that of training.
        """
        computation = self._computation
        calls: list[None] = []

        def run(*_: Any, **__: Any) -> Any:
            calls.append(None)
            if len(calls) > 1:
                raise several_calls()
            return computation.model.call(*call[0], **call[1])

        stand_in = Called(run, self._form, computation.model)
        computation.called = cast_outputs_to_fp32(stand_in, computation.precision)
        values = computation.per_sample(arrays, weights, training)
        self._check_no_added_loss()
        self.forms[training] = computation.names, computation.weighted
        return values

    def _check_no_added_loss(self) -> None:
        """Check that the layers of this stage, which have just been called, add nothing to the loss.

        Raises:
            TaskError: If they do.
        """
        if self._computation.model.losses:
            raise TaskError(
                "layers of the model add losses of their own (regularizers or add_loss), which stages cannot "
                "add up",
                "Use weight_decay in place of regularizers, or leave stages out.",
            )

    def _gradients(
        self, tape: tf.GradientTape, outputs: list[Tensor], weights: list[Tensor], given: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the stage's parameters, and of what it was given."""
        update = self._update
        parameters = [variable.value for variable in update.parameters]
        none: list[Tensor] = [None] * (len(parameters) + len(given))
        found = tape.gradient(outputs, [*parameters, *given], weights) if outputs else none
        own, self._computation.unused = update.fill_in_unused(found[: len(parameters)])
        return own, found[len(parameters) :]

    def _computed(self, call: Any, weights: Tensor, seeds: Tensor) -> Any:
        """Return the outputs of the stage in training."""
        self._set_seeds(seeds)
        model = self._computation.model
        self._computation.batch_norm.weights = weights
        model._clear_losses()
        with phase_of_layers(training=True):
            outputs = model.call(*call[0], **call[1])
        self._check_no_added_loss()
        return self._without_masks(outputs)

    @staticmethod
    def _without_masks(outputs: Any) -> Any:
        """Return outputs with tensors in place of numbers, as a compiled function returns them.

        Raises:
            TaskError: If a tensor has a mask, which would be lost.
        """
        masked = any(getattr(t, "_keras_mask", None) is not None for t in tf.nest.flatten(outputs))
        if masked:
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

    def _call(self, place: int, received: Message | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the stage is called with."""
        if received is not None:
            return (from_message(received),), {}
        computation = self._computation
        objective = computation.train_objective if self._training else computation.eval_objective
        return call_of(objective, self._counted(place)[0], self._form, computation.model)

    def _weights(self, place: int) -> Tensor:
        return self._counted(place)[1]

    def _counted(self, place: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return a micro-batch without padding, with its weights and gradient weights."""
        batch = self._batch
        assert batch is not None  # a step has begun
        arrays, weights, gradient_weights = batch.arrays, batch.weights, batch.gradient_weights
        if len(weights.shape) > 1:
            arrays = {name: array[place] for name, array in arrays.items()}
            weights, gradient_weights = weights[place], gradient_weights[place]
        counted = np.flatnonzero(weights.numpy()) if batch.is_padded else np.arange(0)
        if not 0 < len(counted) < len(weights):
            return arrays, weights, gradient_weights
        chosen: Callable[[Tensor], Tensor] = lambda tensor: tf.gather(tensor, counted)  # noqa: E731
        return (
            {name: chosen(array) for name, array in arrays.items()},
            chosen(weights),
            chosen(gradient_weights),
        )

    def _seeds(self, place: int) -> Tensor:
        """Return the states of the seed generators for a micro-batch, (generators, 2)."""
        assert self._batch is not None
        seeds: Tensor = self._computation.seeds(self._batch.step, place)
        return seeds

    def _add_gradients(self, found: list[Tensor]) -> None:
        self.gradients = found if self.gradients is None else self._functions["add"](self.gradients, found)

    def _add(self, rows: Tensor, weights: Tensor) -> None:
        self.last_values = rows, weights
        sums = tf.linalg.matvec(rows, weights)
        self.sums = sums if self.sums is None else self.sums + sums
