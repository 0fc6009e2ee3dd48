"""TensorFlow's gradients as parts of few flat tensors; as in ``torch/reduction/flat.py``."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdtrain.backends.reduction.shards import divide

Tensor = Any

_ROW = 16  # elements: 64 bytes, where TensorFlow's parts of a tensor may begin without a copy


class Bucket:
    """The gradients of one type in one tensor of rows: first those of whole rows, parts without a copy."""

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        sizes = {name: gradient.shape.num_elements() for name, gradient in gradients.items()}
        self._whole = [name for name, size in sizes.items() if size % _ROW == 0]
        self._packed = [name for name in sizes if name not in self._whole]
        self._sizes = sizes
        self._shapes = {name: gradient.shape for name, gradient in gradients.items()}
        self._fill = -sum(sizes[name] for name in self._packed) % _ROW

    def joined(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the flat tensor."""
        rows = [tf.reshape(gradients[name], [-1, _ROW]) for name in self._whole]
        if self._packed:
            parts = [tf.reshape(gradients[name], [-1]) for name in self._packed]
            if self._fill:
                parts.append(tf.zeros([self._fill], parts[0].dtype))
            rows.append(tf.reshape(tf.concat(parts, 0), [-1, _ROW]))
        return tf.concat(rows, 0)

    def parted(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the gradients that a flat tensor holds, by name."""
        packed = sum(self._sizes[name] for name in self._packed) + self._fill
        counts = [self._sizes[name] // _ROW for name in self._whole]
        rows = tf.split(flat, [*counts, packed // _ROW] if packed else counts, 0)
        parts = dict(zip(self._whole, rows, strict=False))
        if packed:
            sizes = [self._sizes[name] for name in self._packed]
            own = tf.split(tf.reshape(rows[-1], [-1]), [*sizes, self._fill] if self._fill else sizes, 0)
            parts |= dict(zip(self._packed, own, strict=False))
        return {name: tf.reshape(part, self._shapes[name]) for name, part in parts.items()}


def make_buckets(gradients: Mapping[str, Tensor], are_several: bool) -> list[Bucket]:
    """Return buckets for gradients, in the order in which a backward pass completes them."""
    kinds: dict[Any, dict[str, Tensor]] = {}
    for name, gradient in reversed(list(gradients.items())):
        if gradient.shape.is_fully_defined():
            kinds.setdefault(gradient.dtype, {})[name] = gradient
    return [
        Bucket({name: kind[name] for name in names})
        for dtype, kind in kinds.items()
        for names in divide({n: g.shape.num_elements() * dtype.size for n, g in kind.items()}, are_several)
    ]
