"""A second way to reduce TensorFlow's gradients, to show what one takes: one class, and a row in a table."""

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.tensorflow.reduction.all_reduce import Reducer


class Fp64(Reducer):
    """All gradients summed in fp64."""

    def describe(self):
        return "fp64, for a test"

    def _sum(self, gradients):
        return [
            tf.cast(hvd.allreduce(tf.cast(g, tf.float64), op=hvd.Sum, name=f"fp64.{name}"), g.dtype)
            for name, g in zip(self._parameters, gradients, strict=True)
        ]
