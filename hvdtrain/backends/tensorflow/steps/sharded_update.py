"""The stages of a step in TensorFlow if each worker updates a part of the parameters."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.tensorflow.functions import marked
from hvdtrain.backends.tensorflow.steps.sharded_parameters import Bucket, OwnSegment, ShardedParameters
from hvdtrain.backends.tensorflow.steps.update import Update
from hvdtrain.config import Config

Tensor = Any

_HALVES = {"fp16": tf.float16, "bf16": tf.bfloat16}


class ShardedUpdate(Update):
    """The update of a step after which every worker has the whole gradient and updates its part.

    Args:
        shards: the parameters.
        *arguments: those of ``Update``; the optimizer is one over the segments.
        **options: those of ``Update``.
    """

    def __init__(self, shards: ShardedParameters, *arguments: Any, **options: Any) -> None:
        self._shards = shards
        super().__init__(*arguments, **options)

    def update(self, gradients: list[Tensor], learning_rate: Tensor) -> None:
        """Collective. Let the optimizer update this worker's part, and gather all parts."""
        self._shards.use(gradients)
        with self._after_reductions():
            self._shards.follow()
        own = [gradient for _, gradient in self._own_gradients(gradients)]
        super().update(own or [tf.zeros([0])], learning_rate)
        self._shards.gather(lambda segment: segment.variable.value, "parameters")

    def _updated(self) -> list[tuple[str, Any]]:
        paths = [segment.field.path for segment in self._shards.segments] or [""]
        return list(zip(paths, self._shards.variables, strict=True))

    def _own_gradients(self, gradients: Sequence[Tensor]) -> list[tuple[OwnSegment, Tensor]]:
        """Return the gradient of each segment, in the order in which the optimizer has them."""
        by_path = {field.path: gradient for field, gradient in zip(self._fields, gradients, strict=True)}
        return [(segment, segment.of(by_path[segment.field.path])) for segment in self._shards.segments]


class ShardedGradientsUpdate(ShardedUpdate):
    """The update of a step in which every worker gets the sum of its part of the gradients alone.

    Each worker sends every other one its part of a bucket when its gradients have been computed; the graph
    then frees them. What a worker receives it adds up. From ``reduce`` on, the gradients of a step are
    this worker's parts, one vector for each bucket.

    Args:
        compression: how gradients travel: "none", "fp16" or "bf16".
        shards: the parameters.
        *arguments: those of ``Update``; the optimizer is one over the segments.
        **options: those of ``Update``.
    """

    def __init__(self, compression: str, shards: ShardedParameters, *arguments: Any, **options: Any) -> None:
        self._half = _HALVES.get(compression)
        super().__init__(shards, *arguments, **options)

    def reduce(self, gradients: Sequence[Tensor], vector: Tensor) -> tuple[list[Tensor], Tensor]:
        """Collective. Return this worker's parts of the gradients, and the sum of the step's vector."""
        self._clock.ready([*gradients, vector])
        by_path = {field.path: gradient for field, gradient in zip(self._fields, gradients, strict=True)}
        parts = [self._sum(bucket, by_path) for bucket in self._shards.buckets]
        vector = hvd.allreduce(self._with_reached(vector), op=hvd.Sum, name="hvdtrain.metrics")
        vector = self._without_reached(vector)
        self._waits_for = [*parts, vector]
        self._clock.reduced(self._waits_for)
        return parts, vector

    def clip(self, gradients: list[Tensor]) -> list[Tensor]:
        """Collective, if the config has a norm. Scale the gradients to a joint norm of at most that."""
        if self._clip_norm is None:
            return gradients
        squares = tf.add_n([tf.reduce_sum(tf.square(tf.cast(part, tf.float64))) for part in gradients])
        norm = tf.sqrt(hvd.allreduce(squares, op=hvd.Sum, name="hvdtrain.gradient_norm"))
        factor = tf.minimum(tf.ones((), tf.float64), self._clip_norm / (norm + 1e-6))  # as clip_by_norm
        return [part * tf.cast(factor, part.dtype) for part in gradients]

    def _agreed(self, is_finite: Tensor) -> Tensor:
        lost = 1.0 - tf.cast(is_finite, tf.float32)
        return tf.equal(hvd.allreduce(lost, op=hvd.Sum, name="hvdtrain.overflow"), 0.0)

    def _own_gradients(self, gradients: Sequence[Tensor]) -> list[tuple[OwnSegment, Tensor]]:
        return [
            (segment, segment.in_part(gradients[bucket.number]))
            for bucket in self._shards.buckets
            for segment in bucket.segments
        ]

    def _sum(self, bucket: Bucket, gradients: dict[str, Tensor]) -> Tensor:
        """Collective. Return the sum over workers of this worker's part of a bucket's gradients."""
        name, size = f"hvdtrain.gradients.{bucket.number}", self._shards.workers.size
        flat, factor = bucket.joined(lambda field: gradients[field.path]), 1
        is_half = self._half is not None and bucket.dtype == tf.float32
        if is_half:
            if self._half == tf.float16 and self.loss_scale is None:
                factor = size  # of parts of a mean over all workers, fp16 would lose digits
            flat = tf.bitcast(tf.cast(flat * factor if factor != 1 else flat, self._half), tf.int16)
        with marked(name):
            received = hvd.alltoall(flat, name=name)
        if is_half:
            received = tf.bitcast(received, self._half)
        parts = tf.reshape(tf.cast(received, bucket.dtype), [size, bucket.layout.part])
        total = tf.reduce_sum(parts, 0)
        return total / factor if factor != 1 else total


def update_kind(config: Config, shards: ShardedParameters | None) -> Callable[..., Update]:
    """Return what makes the update that a config asks for, from the arguments of ``Update``.

    Args:
        config: the job's config.
        shards: the parameters; None if each worker updates all of them.
    """
    if shards is None:
        return Update
    if config.shard == "optimizer":
        return partial(ShardedUpdate, shards)
    return partial(ShardedGradientsUpdate, config.compression, shards)
