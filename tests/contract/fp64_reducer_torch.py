"""A second way to reduce PyTorch's gradients, to show what one takes: one class, and a row in a table."""

import horovod.torch as hvd

from hvdtrain.backends.torch.reduction.all_reduce import Reducer


class Fp64(Reducer):
    """All gradients summed in fp64, after the backward pass."""

    def describe(self):
        return "fp64, for a test"

    def _sum(self, gradients):
        return [
            hvd.allreduce(gradient.double(), op=hvd.Sum, name=f"fp64.{name}").to(gradient.dtype)
            for name, gradient in zip(self._parameters, gradients, strict=True)
        ]
