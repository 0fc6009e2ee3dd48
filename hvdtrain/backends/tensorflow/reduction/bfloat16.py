"""Gradients of TensorFlow that travel as bf16; ``torch/reduction/bfloat16.py`` does the same for PyTorch.

Horovod 0.28.1 sums no bf16, over MPI, Gloo or NCCL: what travels are its bits.
"""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.tensorflow.functions import marked
from hvdtrain.backends.tensorflow.reduction.reducer import Reducer

Tensor = Any
Variable = Any


class BFloat16(Reducer):
    """Sums gradients over workers in fp32, which come and go as bf16: half the bytes of fp32; see ``torch/``.

    Args:
        workers: the job's workers, whose number is fixed.
        scaled: whether a loss scale has multiplied the gradients, which changes nothing here.
    """

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        return "fp32, sent as bf16"

    def _sum(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Collective. Return the sums; those that are not fp32 travel as they are."""
        # the shape of a gradient may be unknown
        parameters = self._parameters.values()
        gradients = [laid_out_as(p, g) for p, g in zip(parameters, gradients, strict=True)]
        found = list(gradients)
        rounded = []
        for index, gradient in enumerate(gradients):
            if gradient.dtype == tf.float32:
                rounded.append(index)
                continue
            name = f"hvdtrain.bf16.{index}"
            with marked(name):
                found[index] = hvd.allreduce(gradient, op=hvd.Sum, name=name)
        if rounded:
            sums = self._sum_rounded(
                tf.concat([tf.reshape(gradients[i], [-1]) for i in rounded], 0), "hvdtrain.bf16"
            )
            parts = tf.split(sums, [gradients[i].shape.num_elements() for i in rounded])
            for index, part in zip(rounded, parts, strict=True):
                found[index] = tf.reshape(part, gradients[index].shape)
        return found

    def _sum_rounded(self, values: Tensor, name: str) -> Tensor:
        """Collective. Return the sum over workers of a vector that travels as bf16."""
        size = self._workers.size
        length = values.shape.num_elements()
        padded = tf.pad(values, [[0, -length % size]])
        with marked(name):
            received = hvd.alltoall(tf.bitcast(tf.cast(padded, tf.bfloat16), tf.int16), name=name)
        parts = tf.reshape(tf.cast(tf.bitcast(received, tf.bfloat16), tf.float32), [size, -1])
        own = tf.cast(tf.reduce_sum(parts, 0), tf.bfloat16)
        with marked(f"{name}.sum"):
            gathered = hvd.allgather(tf.bitcast(own, tf.int16), name=f"{name}.sum")
        return tf.cast(tf.bitcast(gathered, tf.bfloat16), tf.float32)[:length]


def laid_out_as(parameter: Variable, gradient: Tensor) -> Tensor:
    """Return a gradient whose shape is known while a step is traced: that of its parameter."""
    if gradient.shape.is_fully_defined():
        return gradient
    return tf.ensure_shape(gradient, parameter.shape)
