"""Keras masks: places of a model's outputs that losses and metrics leave out, as in ``model.fit``.

PyTorch has none. Keras keeps a mask as a tensor's attribute, which operations and compiled functions lose.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

Tensor = Any

_KEY = "_keras_mask"


def mask_of(outputs: Any) -> Tensor | None:
    """Return the mask of a tensor; None if it has none."""
    return getattr(outputs, _KEY, None)


def with_mask(outputs: Tensor, mask: Tensor | None) -> Tensor:
    """Return a tensor that has this mask, if it is one."""
    if mask is not None:
        outputs._keras_mask = mask
    return outputs


def is_masked(outputs: Any) -> bool:
    """Return whether a tensor among a model's outputs has a mask."""
    return any(mask_of(tensor) is not None for tensor in tf.nest.flatten(outputs))


def shaped_like(mask: Tensor | None, targets: Tensor) -> Tensor | None:
    """Return a mask as floats of the targets' rank; None if there is none."""
    if mask is None:
        return None
    ones = [1] * (targets.shape.rank - mask.shape.rank)
    return tf.cast(tf.reshape(mask, tf.concat([tf.shape(mask), tf.constant(ones, tf.int32)], 0)), tf.float32)


def masks_beside(outputs: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch that carries the outputs' masks out of a compiled function, for ``masks_within``."""
    masks = {str(i): mask_of(t) for i, t in enumerate(tf.nest.flatten(outputs)) if mask_of(t) is not None}
    return {**batch, _KEY: masks} if masks else batch


def masks_within(outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return outputs that have their masks again, and the batch without them."""
    tensors = tf.nest.flatten(outputs)
    for place, mask in batch.get(_KEY, {}).items():
        with_mask(tensors[int(place)], mask)
    return outputs, {name: array for name, array in batch.items() if name != _KEY}
