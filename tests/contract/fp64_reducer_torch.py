"""A second way to reduce PyTorch's gradients, to show what one takes: one class, and a row in a table."""

import horovod.torch as hvd

from hvdtrain.backends.reduction import GradientReducer


class Fp64AllReduce(GradientReducer):
    """All gradients summed in fp64, after the backward pass."""

    def __init__(self, workers, scaled):
        self.workers = workers

    def attach(self, parameters):
        self.names = list(parameters)

    def finish(self, gradients):
        if self.workers.size == 1:
            return list(gradients)
        return [
            hvd.allreduce(gradient.double(), op=hvd.Sum, name=f"fp64.{name}").to(gradient.dtype)
            for name, gradient in zip(self.names, gradients, strict=True)
        ]

    def finish_with(self, gradients, vector):
        if self.workers.size > 1:
            hvd.allreduce_(vector, op=hvd.Sum, name="fp64.metrics")
        return self.finish(gradients), vector

    def describe(self):
        return "fp64, for a test"
