"""Adasum of what Keras's variables moved. ``torch/`` has the same."""

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.adasum import check_sizes
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.model_state import Field

Tensor = Any


class Adasum:
    """Combines what workers have learned, by one message for each portable array.

    A portable array is what the other framework has as one parameter, so that both compute the same.

    Args:
        fields: the trainable parameters as portable arrays.
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        self._parts = {field.path: native(field.variable) for field in fields}
        check_sizes({path: _sent_bytes(variable) for path, variable in self._parts.items()})
        self._starts = {
            path: tf.Variable(v, trainable=False, name="start") for path, v in self._parts.items()
        }

    def begin(self) -> None:
        """Note where the workers start from. Local: no collective."""
        for path, variable in self._parts.items():
            self._starts[path].assign(variable)

    def combine(self) -> None:
        """Collective. Let each parameter move by what the workers' movements combine to; traced."""
        for number, (path, variable) in enumerate(self._parts.items()):
            start = self._starts[path].read_value()
            moved = _known(variable.read_value() - start)
            combined = hvd.allreduce(moved, op=hvd.Adasum, name=f"hvdtrain.adasum.{number}")
            variable.assign(start + tf.cast(combined, start.dtype))


def _sent_bytes(variable: Tensor) -> int:
    return int(variable.shape.num_elements() * max(variable.dtype.size, tf.float32.size))


def _known(tensor: Tensor) -> Tensor:
    """Return a tensor with a type that Horovod combines on every machine."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < tf.float32.size else tensor
