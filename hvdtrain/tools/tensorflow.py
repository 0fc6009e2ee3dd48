"""What tools do with TensorFlow: a worker alone, and all-reduces in a compiled function."""

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.base import Backend
from hvdtrain.backends.tensorflow.backend import TensorFlowBackend
from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers


def backend_alone(config: Config, job: Backend, alone: Workers) -> Backend:
    """Return a backend on the device of the job's, whose steps have no collective. Local: no collective."""
    device = "CPU" if job.info.description.endswith(" on the CPU") else "GPU"
    backend: Backend = TensorFlowBackend(alone, device)
    return backend


def count_gpus() -> int:
    """Return how many GPUs TensorFlow sees."""
    return len(tf.config.list_physical_devices("GPU"))


def check_dense(backend: Any) -> None:
    """Do nothing: gradients of Keras models are summed as dense ones."""


def all_reduce_of(size: int, on_gpu: bool) -> Callable[[], None]:
    """Return a function that sums a tensor over the workers, and waits for the sum. It is collective."""
    with tf.device("/GPU:0" if on_gpu else "/CPU:0"):
        tensor = tf.zeros(size // 4)
    name = f"hvdtrain.bench.{size}"
    compiled = tf.function(lambda given: hvd.allreduce(given, op=hvd.Sum, name=name)[:1])

    def reduce() -> None:
        compiled(tensor).numpy()

    return reduce
