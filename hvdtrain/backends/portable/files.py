"""Models that come from elsewhere or go there: what both frameworks say and compare alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.portable.names import state_problems
from hvdtrain.backends.records import Exported, Shapes
from hvdtrain.errors import CheckpointError

LARGEST_DIFFERENCE = 1e-4  # of an output, relative to the largest; rounding alone gives some 1e-6

_SMALL_OUTPUT = 1e-3  # relative to the largest; such an output may be what is left of large numbers


def compare(expected: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]]) -> Exported:
    """Compare two models' outputs on one batch, each output relative to its largest; NaN equals NaN."""
    pairs = list(zip(expected, found, strict=False))
    scales = [_largest(array) for array in expected]
    scale = max(scales, default=0.0)
    if len(expected) != len(found) or any(one.shape != other.shape for one, other in pairs):
        return Exported(np.inf, scale or 1.0)
    least = _SMALL_OUTPUT * scale
    done = Exported(0.0, scale or 1.0)
    for pair, own in zip(pairs, scales, strict=True):
        done = done.joined(Exported(_difference(*pair), max(own, least) or 1.0))
    return done


def _largest(array: NDArray[Any]) -> float:
    finite = np.abs(array.astype(np.float64))
    return float(finite[np.isfinite(finite)].max(initial=0.0))


def _difference(one: NDArray[Any], other: NDArray[Any]) -> float:
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    apart[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return float(np.where(np.isnan(apart), np.inf, apart).max(initial=0.0))


def check_fit(path: Path, expected: Shapes, found: Shapes) -> None:
    """Check that a weights file holds what a model needs, no more and no less."""
    if problems := state_problems(expected, found):
        raise CheckpointError(
            f"{path} does not fit the model:\n  " + "\n  ".join(problems),
            "Rename the file's weights, or give the task the model that they were made by; --init-skip then "
            "takes a part of the checkpoint.",
        )
