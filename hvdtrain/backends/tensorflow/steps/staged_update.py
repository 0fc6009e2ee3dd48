"""The stages of a step in TensorFlow if each worker has a part of the model's layers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.pipeline.groups import Layout, StageReducer
from hvdtrain.backends.pipeline.state import StateOfStage
from hvdtrain.backends.tensorflow.functions import marked
from hvdtrain.backends.tensorflow.reduction.broadcast import broadcast_variables
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.update import Update, all_agree
from hvdtrain.backends.tensorflow.traced_workers import FixedSize

Tensor = Any


class StagedState(StateOfStage, TrainingState):
    """Model and optimizer of one stage as a part of a portable state; the arguments are its bases'."""

    def replicated(self) -> Iterator[tuple[str, Any]]:
        """Return all tensors that replicas have, with the path of the model's tensor that they belong to."""
        return (
            (field.path, field.variable) for field in [*self.model.fields, *self.ema.fields, *self._slots]
        )

    @staticmethod
    def copy(tensors: Sequence[Any], root: int, group: Mapping[str, Any], label: str) -> None:
        """Collective in a group. Copy a rank's variables to the others."""
        broadcast_variables(tensors, root, group, label)


class StagedReducer(StageReducer):
    """Sums the gradients of a stage; see ``StageReducer``."""

    def finish(self, gradients: Sequence[Tensor], vector: Tensor = None) -> tuple[list[Tensor], Tensor]:
        """Collective. Return the sum of each gradient over those that have it, and of a vector over all."""
        sums = self.sums(gradients)
        with marked("hvdtrain.metrics"):
            return sums, hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")


class StagedUpdate(Update):
    """The update of a step of a split model: this worker updates the parameters of its stage.

    Args:
        layout: the place of this worker.
        counted_elsewhere: the paths of the parameters that are an earlier stage's in the gradient's norm.
        *arguments: those of ``Update``.
        workers: not used: the update waits for all workers of the job.
        **options: those of ``Update``.
    """

    def __init__(
        self,
        layout: Layout,
        counted_elsewhere: Collection[str],
        *arguments: Any,
        workers: object,
        **options: Any,
    ) -> None:
        self._layout, self._counted_elsewhere = layout, counted_elsewhere
        self._squared_norm = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="squared_norm")
        super().__init__(*arguments, workers=FixedSize(layout.workers.size), **options)

    @property
    def parameters(self) -> list[Any]:
        """The trainable parameters of this stage, one for each gradient."""
        return self._parameters

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
            if field.path not in self._counted_elsewhere
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

    def _with_reached(self, vector: Tensor) -> Tensor:
        return vector  # which has the same numbers in all stages

    def _without_reached(self, vector: Tensor) -> Tensor:
        return vector

    _agreed = staticmethod(all_agree)
