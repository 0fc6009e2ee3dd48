"""How far apart arrays of two frameworks are, in whichever layout they lie."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_TINY = 1e-300


@dataclass(frozen=True)
class Difference:
    """How far apart two arrays are.

    Attributes:
        absolute: the largest difference of two numbers.
        relative: that, relative to the largest number.
    """

    absolute: float
    relative: float


def difference(one: Array, other: Array, scale: float = 0.0) -> Difference:
    """Return how far apart two arrays of one shape are; numbers that are NaN or infinite in both are equal.

    Args:
        one: an array.
        other: another one.
        scale: a number that the difference is compared with if no number of the arrays is as large.
    """
    left, right = one.astype(np.float64), other.astype(np.float64)
    if not left.size:
        return Difference(0.0, 0.0)
    with np.errstate(all="ignore"):
        apart = np.abs(left - right)
    apart[(left == right) | (np.isnan(left) & np.isnan(right))] = 0.0
    absolute = float(apart.max())
    if not np.isfinite(absolute):
        return Difference(float("inf"), float("inf"))
    finite = np.abs(np.concatenate([left.ravel(), right.ravel()]))
    largest = float(finite[np.isfinite(finite)].max(initial=0.0))
    return Difference(absolute, absolute / max(largest, scale, _TINY))


def aligned(
    left: Array | None, right: Array | None, left_first: bool = False, right_first: bool = False
) -> tuple[Array, Array] | None:
    """Return two arrays in one layout, the second one's; None if their shapes do not allow it.

    Args:
        left: PyTorch's.
        right: TensorFlow's.
        left_first: whether the second axis of PyTorch's is known to be that of channels.
        right_first: the same of TensorFlow's.
    """
    if left is None or right is None:
        return None
    if right_first and right.ndim > 2:
        right = np.moveaxis(right, 1, -1)
    candidates = [one for one in _layouts(left, left_first) if one.shape == right.shape]
    if not candidates:
        return None
    return min(candidates, key=lambda one: difference(one, right).absolute), right


def _layouts(array: Array, channels_first: bool) -> Iterator[Array]:
    """Yield the layouts in which the other framework may have an array."""
    if array.ndim <= 2:
        yield array
        return
    yield np.moveaxis(array, 1, -1)
    if not channels_first:
        yield array
        yield np.swapaxes(array, 0, 1)  # time before samples
