"""Values of samples that are not finite: NaN and infinity."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def describe_not_finite(arrays: Mapping[str, NDArray[Any]], indices: NDArray[np.int64]) -> str:
    """Return the first sample with a value that is not finite, in words; empty if there is none.

    Args:
        arrays: name to array; the first axes are those of ``indices``.
        indices: the samples' indices in the data set.
    """
    for name, array in arrays.items():
        if array.dtype.kind not in "fc":
            continue
        is_finite = np.isfinite(array)
        if is_finite.all():
            continue
        rows = is_finite.reshape(indices.size, -1)
        bad = np.flatnonzero(~rows.all(axis=1))
        value = array.reshape(rows.shape)[bad[0]][~rows[bad[0]]][0]
        more = f", as do {bad.size - 1} more of its batch" if bad.size > 1 else ""
        return f"{name!r} of sample {int(indices.flat[bad[0]])} holds {value}{more}"
    return ""
