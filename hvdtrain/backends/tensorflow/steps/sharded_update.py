"""The stages of a step in TensorFlow if each worker updates a part of the parameters."""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.tensorflow.reduction.sharded import Sharded
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import ShardedParameters, segment_of
from hvdtrain.backends.tensorflow.state.model_state import Field
from hvdtrain.backends.tensorflow.steps.update import Update, all_agree

Tensor = Any


class ShardedUpdate(Update):
    """The update of a step after which every worker has the whole gradient and updates its part."""

    def __init__(self, shards: ShardedParameters, *arguments: Any, **options: Any) -> None:
        self._shards = shards
        super().__init__(*arguments, **options)

    def update(self, gradients: list[Tensor], learning_rate: Tensor) -> None:
        """Collective. Let the optimizer update this worker's part, and gather all parts."""
        self._shards.use(gradients)
        with self._after_reductions():
            self._shards.follow()
        own = self._own_gradients(gradients)
        super().update(own or [tf.zeros([0])], learning_rate)
        self._shards.gather(lambda segment: segment.tensor.value, "parameters")

    def _updated(self) -> list[tuple[str, Any]]:
        paths = [segment.entry.path for segment in self._shards.segments] or [""]
        return list(zip(paths, self._shards.variables, strict=True))

    def _own_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of each segment, in the order in which the optimizer has them."""
        by_path = {field.path: gradient for field, gradient in zip(self._fields, gradients, strict=True)}
        return [segment_of(segment, by_path[segment.entry.path]) for segment in self._shards.segments]


class ShardedGradientsUpdate(ShardedUpdate):
    """The update of a step in which every worker gets the sum of its part of the gradients alone.

    From ``reduce`` on, the gradients of a step are this worker's parts, one vector for each bucket.
    """

    def __init__(
        self,
        compression: str,
        shards: ShardedParameters,
        trainable: Sequence[Field],
        optimizer: Any,
        reducer: GradientReducer,
        *arguments: Any,
        **options: Any,
    ) -> None:
        parts = Sharded(shards, compression, options.get("loss_scale") is not None)
        super().__init__(shards, trainable, optimizer, parts, *arguments, **options)

    def clip(self, gradients: list[Tensor], clip_norm: float) -> tuple[list[Tensor], Tensor]:
        """Collective. Scale the gradients to a joint norm of at most that; return also what it was."""
        squares = tf.add_n([tf.reduce_sum(tf.square(tf.cast(part, tf.float64))) for part in gradients])
        norm = tf.sqrt(hvd.allreduce(squares, op=hvd.Sum, name="hvdtrain.gradient_norm"))
        factor = tf.minimum(tf.ones((), tf.float64), clip_norm / (norm + 1e-6))  # as clip_by_norm
        return [part * tf.cast(factor, part.dtype) for part in gradients], norm

    _agreed = staticmethod(all_agree)

    def _own_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return [
            s.in_part(gradients[bucket.number]) for bucket in self._shards.buckets for s in bucket.segments
        ]
