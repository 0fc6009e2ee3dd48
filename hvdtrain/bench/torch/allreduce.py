"""Horovod's all-reduce as a step of PyTorch calls it."""

from collections.abc import Callable

import horovod.torch as hvd
import torch

from hvdtrain.backends.torch.flat import flat_zeros


def all_reduce_of(size: int, on_gpu: bool) -> Callable[[], None]:
    """Return a function that sums a tensor over the workers, and waits for the sum. It is collective.

    Args:
        size: bytes of the tensor.
        on_gpu: whether it lies on the GPU.
    """
    tensor = flat_zeros(size // 4, torch.float32, torch.device("cuda") if on_gpu else torch.device("cpu"))
    name = f"hvdtrain.bench.{size}"

    def reduce() -> None:
        hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name=name))
        if on_gpu:
            torch.cuda.synchronize()

    return reduce
