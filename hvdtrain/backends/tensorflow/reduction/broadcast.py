"""Copying variables from one worker to all, as few long messages in place of one for each variable."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

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
    for number, part in enumerate(_parts([native(variable) for variable in variables])):
        lengths = [_bytes_of(variable) for variable in part]
        if is_root:
            sent = np.concatenate([_as_bytes(variable.numpy()) for variable in part])
        else:
            sent = np.zeros(sum(lengths), np.uint8)
        received = _broadcast(sent, root, f"hvdtrain.{label}.{number}", group)
        if is_root:
            continue
        ends = np.cumsum(lengths)
        for variable, end, length in zip(part, ends, lengths, strict=True):
            values = received[end - length : end].view(variable.dtype.as_numpy_dtype)
            variable.assign(values.reshape(variable.shape))


def _parts(variables: Sequence[Variable]) -> Iterator[list[Variable]]:
    """Return the variables in groups of about the length of a message."""
    part: list[Variable] = []
    for variable in variables:
        if part and sum(map(_bytes_of, [*part, variable])) > MESSAGE_BYTES:
            yield part
            part = []
        part.append(variable)
    if part:
        yield part


def _broadcast(values: Bytes, root: int, name: str, group: Mapping[str, Any]) -> Bytes:
    """Collective. Return the root's bytes; a variable that is longer than a message travels in several."""
    starts = range(0, len(values), MESSAGE_BYTES)
    with tf.device("CPU"):
        received = [
            hvd.broadcast(
                tf.constant(values[start : start + MESSAGE_BYTES]), root, name=f"{name}.{start}", **group
            )
            for start in starts
        ]
    if len(received) == 1:
        return np.asarray(received[0].numpy())
    return np.concatenate([np.zeros(0, np.uint8), *(tensor.numpy() for tensor in received)])


def _bytes_of(variable: Variable) -> int:
    length: int = variable.shape.num_elements() * variable.dtype.size
    return length


def _as_bytes(values: Any) -> Bytes:
    return np.asarray(values).reshape(-1).view(np.uint8)
