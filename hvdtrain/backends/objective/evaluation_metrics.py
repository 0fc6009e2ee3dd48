"""The metrics of a whole evaluation, beside those that are means: which a task has, and evaluating them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.metric_objects import TakenObject, is_metric_object
from hvdtrain.backends.objective.metric_states import Collectives, GatheredState, SumState, merge, merge_alone
from hvdtrain.backends.objective.named_metrics import NAMES, MetricFunctions, named_metric
from hvdtrain.backends.objective.stateful_metrics import (
    GatheredMetric,
    Part,
    Rows,
    StatefulMetric,
    SumMetric,
    as_number,
)
from hvdtrain.early_stopping import check_metric_names
from hvdtrain.errors import HvdtrainError, TaskError
from hvdtrain.workers.agreement import Workers, run_on_rank_zero
from hvdtrain.workers.user_errors import where_raised

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


# what an evaluation's call of the model gave: (outputs, batch), or nothing if there are no such metrics
Seen = tuple[Any, ...]


def is_stateful(metric: Any) -> bool:
    """Return whether a task's metric is one of a whole evaluation, and not a mean over samples."""
    is_named = isinstance(metric, str) and metric in NAMES
    return is_named or isinstance(metric, SumMetric | GatheredMetric) or is_metric_object(metric)


class EvaluationMetrics:
    """The metrics of a whole evaluation of one task.

    Args:
        states: the metrics by name, in the task's order.
        order: the names of all metrics of the task.
    """

    def __init__(self, states: Mapping[str, StatefulMetric], order: tuple[str, ...] = ()) -> None:
        self.order = order
        self._states = dict(states)
        self._seen: Seen = ()

    @classmethod
    def of(cls, task: Any, functions: MetricFunctions) -> "EvaluationMetrics":
        """Return those of a task.

        Args:
            task: the task, of which ``make_objective`` was made.
            functions: what the framework computes.
        """
        if hasattr(task, f"{functions.framework}_loss"):
            return cls({})
        given = getattr(task, "metrics", {})
        states: dict[str, StatefulMetric] = {}
        order: list[str] = []
        for name, metric in given.items():
            found = _states(name, metric, task, functions) if is_stateful(metric) else {}
            order += found or [name]
            states |= found
        _check_names(order)
        return cls(states, tuple(order) if states else ())

    def __bool__(self) -> bool:
        return bool(self._states)

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def watch(self, outputs: Any, batch: Mapping[str, Any]) -> None:
        """Keep the outputs and the batch of a call of the model, for ``take``."""
        if self._states:
            self._seen = outputs, batch

    def take(self) -> Seen:
        """Return what was kept of the last call, and forget it."""
        seen, self._seen = self._seen, ()
        return seen

    def begin(self) -> None:
        """Begin an evaluation."""
        for state in self._states.values():
            state.begin()

    def add(self, seen: Seen, rows: Rows) -> None:
        """Add a micro-batch.

        Raises:
            TaskError: naming the metric that fails.
        """
        for name, state in self._states.items():
            with _named(f"metrics[{name!r}] fails"):
                outputs, batch = seen
                state.add(outputs, batch, rows)

    def try_out(self, seen: Seen, rows: Rows) -> None:
        """Compute the metrics of one micro-batch of this worker alone, and forget it. Local: no collective.

        Raises:
            TaskError: naming the metric that fails.
        """
        self.begin()
        try:
            self.add(seen, rows)
            merged = merge_alone({name: state.parts() for name, state in self._states.items()})
            for name, state in self._states.items():
                with _named(f"metrics[{name!r}]: compute fails for the first batch alone"):
                    check_number(name, state.compute(merged[name]))
        finally:
            self.begin()

    def computed(self, workers: Workers, collectives: Collectives) -> dict[str, float]:
        """Collective. Return the metrics of the evaluation, by name.

        Raises:
            TaskError: on every worker alike, naming the metric that fails.
        """
        if not self._states:
            return {}
        merged = merge({name: s.parts() for name, s in self._states.items()}, workers, collectives)

        def compute() -> dict[str, float]:
            found = {}
            for name, state in self._states.items():
                with _named(f"metrics[{name!r}]: compute fails"):
                    found[name] = check_number(name, state.compute(merged[name]))
            return found

        try:
            return run_on_rank_zero(workers, compute)
        finally:
            self.begin()  # gathered rows take memory


def check_number(name: str, value: Any) -> float:
    """Return what a metric computed as a number; it may be NaN.

    Raises:
        TaskError: If it is not one number.
    """
    if (number := as_number(value)) is None:
        found = f"{value.dtype} {value.shape}" if hasattr(value, "shape") else type(value).__name__
        raise TaskError(
            f"metrics[{name!r}]: compute must return one number; found {found}",
            "Return a float, and float('nan') where the metric is not defined. Of several numbers, "
            "give each a metric of its own.",
        )
    return number


def _states(name: str, metric: Any, task: Any, functions: MetricFunctions) -> Mapping[str, StatefulMetric]:
    """Return the states of a metric by what they are logged as: one, or those of a collection of objects."""
    if isinstance(metric, SumMetric):
        return {name: SumState(name, metric, functions.to_numpy)}
    if isinstance(metric, GatheredMetric):
        return {name: GatheredState(name, metric, functions.to_numpy)}
    if isinstance(metric, str):
        return {name: named_metric(name, metric, task, functions)}
    return functions.object_states(name, metric, task)


def _check_names(names: Sequence[str]) -> None:
    """Check the names of all metrics: those of a collection's members come to the task's own.

    Raises:
        TaskError: If two metrics have one name, or one has the name of a number that hvdtrain logs.
    """
    check_metric_names(names, "the task's metrics")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TaskError(
            f"the task has two metrics {twice!r}, of which one is a member of a collection",
            "Give one of them another name.",
            everywhere=True,
        )


@contextmanager
def _named(problem: str) -> Iterator[None]:
    """Return a context whose exceptions, if they are not hvdtrain's, become a TaskError."""
    try:
        yield
    except HvdtrainError:
        raise
    except Exception as error:
        raise TaskError(
            f"{problem}: {where_raised(error, own_only=True)}",
            "--debug shows the traceback. A dry run computes metrics of its first batch, too: return "
            "float('nan') where so few samples do not define one.",
        ) from error
