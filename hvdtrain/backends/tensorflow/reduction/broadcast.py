"""Copying variables from one worker to all, as few long messages in place of one for each variable."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.reduction.local_steps import in_parts
from hvdtrain.backends.tensorflow.functions import native

Variable = Any
Bytes = NDArray[np.uint8]

MESSAGE_BYTES = 16 << 20  # of which a worker has up to four copies at a time

_ALL: Mapping[str, Any] = MappingProxyType({})  # to all workers


def broadcast_variables(
    variables: Sequence[Variable], root: int, group: Mapping[str, Any] = _ALL, label: str = "state"
) -> None:
    """Collective. Copy the root's values of variables to every worker, or to some."""
    is_root = hvd.rank() == root
    natives = [native(variable) for variable in variables]
    sizes = [variable.shape.num_elements() * variable.dtype.size for variable in natives]
    for number, places in enumerate(in_parts([("", size) for size in sizes], MESSAGE_BYTES)):
        part, lengths = [natives[place] for place in places], [sizes[place] for place in places]
        if is_root:
            sent = np.concatenate([as_bytes(variable) for variable in part])
        else:
            sent = np.zeros(sum(lengths), np.uint8)
        received = _broadcast(sent, root, f"hvdtrain.{label}.{number}", group)
        if is_root:
            continue
        ends = np.cumsum(lengths)
        for variable, end, length in zip(part, ends, lengths, strict=True):
            values = received[end - length : end].view(variable.dtype.as_numpy_dtype)
            variable.assign(values.reshape(variable.shape))


def _broadcast(values: Bytes, root: int, name: str, group: Mapping[str, Any]) -> Bytes:
    """Collective. Return the root's bytes; a variable that is longer than a message travels in several."""
    starts = range(0, len(values), MESSAGE_BYTES)
    with tf.device("CPU"):
        parts = {f"{name}.{start}": values[start : start + MESSAGE_BYTES] for start in starts}
        received = [hvd.broadcast(tf.constant(p), root, name=key, **group) for key, p in parts.items()]
    if len(received) == 1:
        return np.asarray(received[0].numpy())
    return np.concatenate([np.zeros(0, np.uint8), *(tensor.numpy() for tensor in received)])


def as_bytes(variable: Variable) -> Bytes:
    """Return a variable's values as bytes in the host's memory."""
    return np.ascontiguousarray(variable.numpy()).reshape(-1).view(np.uint8)
