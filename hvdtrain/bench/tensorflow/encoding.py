"""What TensorFlow spends on turning gradients into messages and back, without sending them."""

from collections.abc import Callable, Sequence
from math import prod

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdtrain.backends.base import Backend
from hvdtrain.backends.tensorflow.low_rank import LowRank
from hvdtrain.backends.tensorflow.model_state import Field
from hvdtrain.backends.tensorflow.traced_workers import FixedSize


def check_dense(backend: Backend) -> None:
    """Do nothing: gradients of Keras models are summed as dense ones."""


def half_of(shapes: Sequence[tuple[int, ...]], on_gpu: bool) -> Callable[[], None]:
    """Return a function that rounds gradients to fp16 and back. Local.

    Args:
        shapes: of the parameters.
        on_gpu: whether they lie on the GPU.
    """
    with tf.device(_device(on_gpu)):
        flat = tf.zeros(sum(map(prod, shapes)))

    rounded = tf.function(lambda values: tf.cast(tf.cast(values, tf.float16), tf.float32))

    def encode() -> None:
        rounded(flat)[:1].numpy()

    return encode


def half_sum_of(shapes: Sequence[tuple[int, ...]], on_gpu: bool) -> Callable[[], None]:
    """Return a function that sums gradients over the workers as fp16. It is collective.

    Args:
        shapes: of the parameters.
        on_gpu: whether they lie on the GPU.
    """
    with tf.device(_device(on_gpu)):
        small = tf.zeros(sum(map(prod, shapes)), tf.float16)
    compiled = tf.function(lambda given: hvd.allreduce(given, op=hvd.Sum, name="hvdtrain.plan.fp16")[:1])

    def reduce() -> None:
        compiled(small).numpy()

    return reduce


def low_rank_of(shapes: Sequence[tuple[int, ...]], rank: int, on_gpu: bool) -> Callable[[], None]:
    """Return a function that does what PowerSGD does with gradients, for one worker alone. Local.

    Args:
        shapes: of the parameters.
        rank: columns of the thin matrices.
        on_gpu: whether they lie on the GPU.
    """
    with tf.device(_device(on_gpu)):
        variables = [keras.Variable(tf.zeros(shape)) for shape in shapes]
        gradients = [tf.random.normal(shape) for shape in shapes]
        names = [str(number) for number in range(len(variables))]
        fields = [Field(name, name, one, one.shape) for name, one in zip(names, variables, strict=True)]
        reducer = LowRank(FixedSize(1), fields, rank, 0)
        reducer.attach(dict(zip(names, variables, strict=True)))
    step = tf.function(reducer.finish)

    def encode() -> None:
        for one in step(gradients):
            last = one
        tf.reshape(last, [-1])[:1].numpy()

    return encode


def _device(on_gpu: bool) -> str:
    return "/GPU:0" if on_gpu else "/CPU:0"
