"""Gradients of TensorFlow of which each worker gets the sum of its part alone."""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.reduction.shards import type_of_parts
from hvdtrain.backends.tensorflow.functions import marked
from hvdtrain.backends.tensorflow.reduction.reducer import Reducer
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import Bucket, ShardedParameters
from hvdtrain.backends.tensorflow.traced_workers import FixedSize

Tensor = Any


class Sharded(Reducer):
    """Sums each worker's part of the gradients, one vector for each bucket of parameters.

    Each worker sends every other one its part of a bucket when its gradients have been computed; the graph
    then frees them. What a worker receives it adds up.
    """

    def __init__(self, shards: ShardedParameters, compression: str, scaled: bool = False) -> None:
        super().__init__(FixedSize(shards.workers.size), scaled)
        self._buckets = shards.buckets
        kind, self._factor = type_of_parts(compression, shards.workers.size, scaled)
        self._kind = tf.as_dtype(kind)

    def _sum(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Collective. Return this worker's parts of the sums."""
        by_path = dict(zip(self._parameters, gradients, strict=True))
        return [self._sum_of(bucket, by_path) for bucket in self._buckets]

    def _sum_of(self, bucket: Bucket, gradients: dict[str, Tensor]) -> Tensor:
        """Collective. Return the sum over workers of this worker's part of a bucket's gradients."""
        name, size = f"hvdtrain.gradients.{bucket.number}", self._workers.size
        flat, factor = bucket.joined(lambda field: gradients[field.path]), 1
        is_half = bucket.dtype == tf.float32 and self._kind != tf.float32
        if is_half:
            factor = self._factor
            flat = tf.bitcast(tf.cast(flat * factor if factor != 1 else flat, self._kind), tf.int16)
        with marked(name):
            received = hvd.alltoall(flat, name=name)
        if is_half:
            received = tf.bitcast(received, self._kind)
        parts = tf.reshape(tf.cast(received, bucket.dtype), [size, bucket.layout.part])
        total = tf.reduce_sum(parts, 0)
        return total / factor if factor != 1 else total
