"""Fewer points for long curves, without losing their highest and lowest ones."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hvdtrain.run_views.curves import Numbers

LEAST = 40  # points that every curve may have


def thin(values: Numbers, limit: int) -> NDArray[np.intp]:
    """Return the indices of points that stand for a curve, in order.

    The curve is cut into buckets of neighbours. Of each of them, the lowest point, the highest one and one
    that is not finite stay. The first and the last point stay, too.

    Args:
        values: the points.
        limit: about how many stay; all if there are not more. Those that are not finite come on top.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    kept = {0, count - 1}
    for bucket in np.array_split(np.arange(count), max(1, (limit - 2) // 2)):
        is_finite = np.isfinite(values[bucket])
        finite, others = bucket[is_finite], bucket[~is_finite]
        if len(finite):
            kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
        if len(others):
            kept.add(int(others[0]))
    return np.array(sorted(kept), dtype=np.intp)


def points_for_each(lengths: Sequence[int], total: int) -> int:
    """Return how many points each curve may have, so that all curves together have about a total."""
    if sum(lengths) <= total:
        return max(lengths, default=LEAST)
    left, curves = total, len(lengths)
    for length in sorted(lengths):
        if length * curves > left:
            break
        left, curves = left - length, curves - 1
    return max(LEAST, left // max(curves, 1))
