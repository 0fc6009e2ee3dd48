"""A second way to reduce TensorFlow's gradients, to show what one takes: one class, and a row in a table."""

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.reduction import GradientReducer


class Fp64AllReduce(GradientReducer):
    """All gradients summed in fp64."""

    def __init__(self, workers, scaled):
        self.workers = workers

    def attach(self, parameters):
        self.names = list(parameters)

    def finish(self, gradients):
        if not self.workers.may_reduce:
            return list(gradients)
        return [
            tf.cast(
                hvd.allreduce(tf.cast(gradient, tf.float64), op=hvd.Sum, name=f"fp64.{i}"), gradient.dtype
            )
            for i, gradient in enumerate(gradients)
        ]

    def finish_with(self, gradients, vector):
        if self.workers.may_reduce:
            vector = hvd.allreduce(vector, op=hvd.Sum, name="fp64.metrics")
        return self.finish(gradients), vector

    def describe(self):
        return "fp64, for a test"
