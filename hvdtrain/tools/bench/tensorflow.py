"""Horovod's all-reduce as a step of TensorFlow calls it: in a compiled function."""

from collections.abc import Callable

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.base import Backend


def check_dense(backend: Backend) -> None:
    """Do nothing: gradients of Keras models are summed as dense ones."""


def all_reduce_of(size: int, on_gpu: bool) -> Callable[[], None]:
    """Return a function that sums a tensor over the workers, and waits for the sum. It is collective.

    Args:
        size: bytes of the tensor.
        on_gpu: whether it lies on the GPU.
    """
    with tf.device("/GPU:0" if on_gpu else "/CPU:0"):
        tensor = tf.zeros(size // 4)
    name = f"hvdtrain.bench.{size}"
    compiled = tf.function(lambda given: hvd.allreduce(given, op=hvd.Sum, name=name)[:1])

    def reduce() -> None:
        compiled(tensor).numpy()

    return reduce
