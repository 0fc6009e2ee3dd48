"""What lars and lamb have in common in both frameworks: which parameters they adapt to.

The formulas are in each framework's ``large_batch.py``.
"""

# keeps lars from dividing by 0; too small to change what it does otherwise
LARS_EPSILON = 1e-8

_NEVER = ("bias", "beta", "gamma")


def adapts(path: str, shape: tuple[int, ...]) -> bool:
    """Return whether lars and lamb scale the update of a parameter by its norm, and let it decay.

    Biases and what norms multiply by and add are left out, as is usual: their own norm says nothing of
    how far they may move. Names and shapes are the portable ones, so both frameworks agree.

    Args:
        path: portable path, such as "conv1/kernel".
        shape: the portable array's.
    """
    return len(shape) > 1 and path.rpartition("/")[2] not in _NEVER
