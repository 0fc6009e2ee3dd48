"""How far apart two trainings have moved parameters, relative to how far they moved them."""

from collections.abc import Iterable

import numpy as np

from hvdtrain.backends.base import PortableState
from hvdtrain.parity.differences import Array

_LEAST_MOVEMENT = 1e-3  # smaller parts of the largest movement of all parameters count as rounding
_LEAST_NUMBER = 1e-10  # and so do smaller parts of the parameter itself


def moved_apart(
    left: PortableState, right: PortableState, start: PortableState, names: Iterable[str]
) -> dict[str, float]:
    """Return how far apart parameters are, relative to their movements, by portable name.

    It is told by root mean squares: Adam makes much of the rounding of a few small gradients.

    Args:
        left: PyTorch's parameters after steps.
        right: TensorFlow's.
        start: what both started from.
        names: names of what training changes.
    """
    names = [name for name in names if all(name in state for state in (left, right, start))]
    moved = {name: max(_size(state[name] - start[name]) for state in (left, right)) for name in names}
    largest = max(moved.values(), default=0.0)
    found = {}
    for name in names:
        apart = _size(left[name] - right[name])
        least = max(_LEAST_MOVEMENT * largest, _LEAST_NUMBER * _size(start[name]))
        found[name] = apart / max(moved[name], least) if apart else 0.0
    return found


def _size(array: Array) -> float:
    """Return the root of the mean square; 0 of an empty array."""
    return float(np.sqrt(np.square(array, dtype=np.float64).mean())) if array.size else 0.0
