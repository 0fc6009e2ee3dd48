"""TensorFlow's nested tensors as messages between stages; ``torch/stage_messages.py`` does so for PyTorch."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.pipeline.messages import Bytes, Message
from hvdtrain.backends.pipeline.nested import pack, unpack

Tensor = Any


def to_message(value: Any) -> Message:
    """Return nested tensors as a message; they may be on any device.

    Raises:
        TaskError: If there is something that cannot be sent.
    """
    return pack(value, tf.is_tensor, _describe)


def from_message(message: Message) -> Any:
    """Return the nested tensors of a message."""
    return unpack(message, _make)


def float_tensors(value: Any) -> list[Tensor]:
    """Return the tensors within a value that can have a gradient, in order."""
    return [
        t for t in tf.nest.flatten(value) if tf.is_tensor(t) and (t.dtype.is_floating or t.dtype.is_complex)
    ]


def _describe(tensor: Tensor) -> tuple[Any, Bytes]:
    array = np.ascontiguousarray(tf.convert_to_tensor(tensor).numpy())
    return (tensor.dtype.name, list(tensor.shape)), array.reshape(-1).view(np.uint8)


def _make(description: Any, buffer: Bytes) -> Tensor:
    kind, shape = description
    return tf.convert_to_tensor(buffer.view(tf.as_dtype(kind).as_numpy_dtype).reshape(shape))
