"""Whether the states of a metric object, on several workers, become that of all samples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.metric_objects import TakenObject
from hvdtrain.backends.objective.stateful_metrics import Part, Rows

Parts = Mapping[str, Part]

_TOLERANCE = 1e-3
_REDUCTIONS: Mapping[str, Callable[..., Any]] = {"sum": np.sum, "max": np.max, "min": np.min}
_REMEDY = (
    "Use an object whose states are sums, maxima or concatenated rows, or write hvdtrain.SumMetric or "
    "hvdtrain.GatheredMetric."
)


def merged_parts(of_workers: Sequence[Parts]) -> dict[str, NDArray[Any]]:
    """Return what workers' states become."""
    found = {}
    for key, first in of_workers[0].items():
        arrays = [parts[key].array for parts in of_workers]
        if first.reduction == "gather":
            found[key] = np.concatenate(arrays)
        elif first.reduction == "stack":
            found[key] = np.stack(arrays)
        else:
            found[key] = np.asarray(_REDUCTIONS[first.reduction](np.stack(arrays), axis=0))
    return found


def check_bytes(taken: TakenObject, parts: Parts, rows: Rows) -> None:
    """Check that what an object keeps of all samples fits into the memory that it may take on rank 0.

    Args:
        taken: the object.
        parts: its state after a batch.
        rows: the samples of the batch.

    Raises:
        TaskError: with what it would take.
    """
    gathered = sum(part.array.nbytes for part in parts.values() if part.reduction == "gather")
    needed = gathered // max(1, int(rows.is_counted.sum())) * rows.total
    if needed > taken.given.max_bytes:
        raise taken.error(
            f"would keep {needed / 2**30:.3g} GiB on rank 0: all {rows.total:,} samples of the evaluation "
            f"set; it may take {taken.given.max_bytes / 2**30:.3g} GiB",
            "Give it bins, such as thresholds=200, if it takes them; or, if rank 0 has the memory, "
            "hvdtrain.MetricObject(..., max_bytes=...).",
        )


def check_merges(
    taken: TakenObject, rows: Rows, state_of: Callable[[Rows], Parts], compute: Callable[[Any], Any]
) -> None:
    """Check that an object gives the same for a batch and for the batch in two parts.

    Args:
        taken: the object.
        rows: which of the batch's samples count.
        state_of: returns the state after an update with these rows alone.
        compute: returns the number of a merged state.

    Raises:
        TaskError: If it does not: the object's value would depend on batch size and workers.
    """
    counted = np.flatnonzero(rows.is_counted)
    cut = max(1, len(counted) // 3)  # unequal parts: a mean of means is another number
    if len(counted) < 2:
        return
    whole = state_of(_only(rows, counted))
    expected = merged_parts([whole])
    # before the parts: what the object keeps besides its state is to differ
    expected_value = _value(compute, expected)
    try:
        parts = [state_of(_only(rows, counted[:cut])), state_of(_only(rows, counted[cut:]))]
    except Exception:  # it does not take so few samples
        return
    merged = merged_parts(parts)
    for key, part in whole.items():
        if part.reduction != "stack" and not _is_close(expected[key], merged[key]):
            raise taken.error(
                f"cannot be added up over workers: its state {key!r} after a batch is not that after the "
                "batch in two parts",
                _REMEDY,
            )
    value = _value(compute, merged)
    if not (expected_value is None or value is None or _is_close(expected_value, value)):
        raise taken.error(
            f"cannot be added up over workers: it gives {expected_value:.6g} for a batch, and {value:.6g} "
            "for the same batch in two parts",
            _REMEDY,
        )


def _value(compute: Callable[[Any], Any], merged: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
    """Return what is computed of a state; None if that fails, which the evaluation reports."""
    try:
        return np.asarray(compute(merged), np.float64)
    except Exception:
        return None


def _only(rows: Rows, counted: NDArray[np.intp]) -> Rows:
    is_counted = np.zeros(len(rows.is_counted), bool)
    is_counted[counted] = True
    return rows._replace(is_counted=is_counted)


def _is_close(one: NDArray[Any], other: NDArray[Any]) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "fiub" or not one.size:
        return True
    one, other = one.astype(np.float64), other.astype(np.float64)
    scale = float(np.nanmax(np.abs(one), initial=0.0)) if np.isfinite(one).any() else 0.0
    return bool(np.allclose(one, other, _TOLERANCE, max(1e-6, 1e-4 * scale), equal_nan=True))
