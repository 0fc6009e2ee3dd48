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
from hvdtrain.bench.predict_ways import GRADIENT


def check_dense(backend: Backend) -> None:
    """Do nothing: gradients of Keras models are summed as dense ones."""


def half_of(shapes: Sequence[tuple[int, ...]], on_gpu: bool) -> Callable[[], None]:
    """Return a function that multiplies gradients, rounds them to fp16 and back, as a job does. Local.

    Args:
        shapes: of the parameters.
        on_gpu: whether they lie on the GPU.
    """
    flat = _gradients(shapes, on_gpu)
    rounded = tf.function(lambda values: tf.cast(tf.cast(values * 2.0, tf.float16), tf.float32))

    def encode() -> None:
        rounded(flat)[:1].numpy()

    return encode


def half_sum_of(shapes: Sequence[tuple[int, ...]], on_gpu: bool) -> Callable[[], None]:
    """Return a function that sums gradients over the workers as fp16. It is collective.

    How long it takes depends on the numbers: Gloo converts zeros faster than others.

    Args:
        shapes: of the parameters.
        on_gpu: whether they lie on the GPU.
    """
    small = tf.cast(_gradients(shapes, on_gpu), tf.float16)
    share = 1 / hvd.size()
    compiled = tf.function(
        lambda given: hvd.allreduce(given, op=hvd.Sum, postscale_factor=share, name="hvdtrain.plan.fp16")[:1]
    )

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


def _gradients(shapes: Sequence[tuple[int, ...]], on_gpu: bool) -> tf.Tensor:
    """Return numbers of the size of gradients, the same on all workers."""
    with tf.device(_device(on_gpu)):
        return GRADIENT * tf.random.stateless_normal([sum(map(prod, shapes))], seed=(0, 0))


def _device(on_gpu: bool) -> str:
    return "/GPU:0" if on_gpu else "/CPU:0"
