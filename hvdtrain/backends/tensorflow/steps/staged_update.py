"""The stages of a step in TensorFlow if each worker has a part of the model's layers."""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.pipeline.stage_step import SharedUpdate
from hvdtrain.backends.pipeline.state import StateOfStage
from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.tensorflow.functions import marked
from hvdtrain.backends.tensorflow.reduction.broadcast import broadcast_variables
from hvdtrain.backends.tensorflow.state.model_state import Field
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.update import Update
from hvdtrain.backends.workers import group_of


class StagedState(StateOfStage, TrainingState):
    """Model and optimizer of one stage as a part of a portable state; the arguments are its bases'."""

    def broadcast(self, others: list[Any]) -> None:
        """Collective. Copy what the first of those workers has that have the same to the others.

        Args:
            others: variables that belong to no parameter, such as counts of steps.
        """
        by_owners: dict[tuple[int, ...], list[Any]] = {(self._layout.stage,): list(others)}
        for field in [*self.model.fields, *self.ema.fields, *self._slots]:
            having = tuple(self._owners.get(field.path, [self._layout.stage]))
            by_owners.setdefault(having, []).append(field.variable)
        for having, variables in sorted(by_owners.items()):
            group = self._groups.of(having)
            if group.size > 1:
                first = self._layout.ranks_of_stage(having[0])[0]
                label = f"stage.{'.'.join(map(str, having))}"
                broadcast_variables(variables, first, group_of(group), label)


Tensor = Any


class StagedUpdate(SharedUpdate, Update):
    """The update of a step of a split model: this worker updates the parameters of its stage."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._squared_norm = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="squared_norm")
        super().__init__(*arguments, **options)

    @property
    def parameters(self) -> list[Any]:
        """The trainable parameters of this stage, one for each gradient."""
        return self._parameters

    def begin(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        for reducer, fields in self._parts():
            reducer.attach({field.path: field.variable for field in fields})

    def reduce(self, gradients: Sequence[Tensor], vector: Tensor) -> tuple[list[Tensor], Tensor]:
        """Collective. Return the sums of gradients over those that have them, and of the vector over all."""
        by_path = {field.path: g for field, g in zip(self._fields, gradients, strict=True)}
        for reducer, fields in self._parts():
            sums, _ = reducer.finish([by_path[field.path] for field in fields])
            by_path |= {field.path: total for field, total in zip(fields, sums, strict=True)}
        with marked("hvdtrain.metrics"):
            vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")
        reduced = [by_path[field.path] for field in self._fields]
        self._waits_for = [*reduced, vector]
        return reduced, vector

    def unscale_or_skip(self, gradients: list[Tensor], vector: Tensor) -> tuple[list[Tensor], Tensor]:
        """Collective, with a loss scale. As without stages; the workers agree on whether to skip."""
        if self.loss_scale is None or gradients:
            return super().unscale_or_skip(gradients, vector)
        _, vector = super().unscale_or_skip([tf.reshape(self._zero.read_value(), [1])], vector)
        return [], vector

    def clip(self, gradients: list[Tensor]) -> list[Tensor]:
        """Collective, if the config has a norm. Scale the gradients of all stages to it."""
        if self._clip_norm is None:
            return gradients
        squares = [
            tf.reduce_sum(tf.square(tf.cast(gradient, tf.float64)))
            for field, gradient in zip(self._fields, gradients, strict=True)
            if self._shared.get(field.path, (None, True))[1]
        ]
        # of a constant, TensorFlow would work out the sum when it compiles the step (see ``dense``)
        own = tf.add_n([tf.cast(self._zero.read_value(), tf.float64), *squares])
        # every replica adds the same
        total = hvd.allreduce(own, op=hvd.Sum, name="hvdtrain.gradient_norm") / self._layout.replicas
        # nothing else needs it in a stage without gradients: TensorFlow would leave out what others wait for
        self._squared_norm.assign(total)
        factor = tf.minimum(
            tf.ones((), tf.float64), self._clip_norm / (tf.sqrt(total) + 1e-6)
        )  # as clip_by_norm
        return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]

    def update(self, gradients: list[Tensor], learning_rate: Tensor) -> None:
        """Let the optimizer take its step, if this stage has parameters."""
        if gradients:
            super().update(gradients, learning_rate)

    def _agreed(self, is_finite: Tensor) -> Tensor:
        lost = 1.0 - tf.cast(is_finite, tf.float32)
        return tf.equal(hvd.allreduce(lost, op=hvd.Sum, name="hvdtrain.overflow"), 0.0)

    def _parts(self) -> list[tuple[GradientReducer, list[Field]]]:
        return self._parts_of(self._fields)
