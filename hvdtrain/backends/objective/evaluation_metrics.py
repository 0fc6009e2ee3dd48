"""The metrics of a whole evaluation that are no means: which a task has, and evaluating them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.backends.objective.metric_objects import is_metric_object, taken_objects
from hvdtrain.backends.objective.named_metrics import NAMES, MetricFunctions, named_metric
from hvdtrain.backends.objective.stateful_metrics import (
    Collectives,
    GatheredMetric,
    Rows,
    RowsState,
    SumMetric,
    as_number,
    on_rank_zero,
)
from hvdtrain.early_stopping import check_metric_names
from hvdtrain.errors import HvdtrainError, TaskError
from hvdtrain.workers.agreement import Workers, run_on_rank_zero
from hvdtrain.workers.user_errors import where_raised

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

    def __init__(self, states: Mapping[str, RowsState], order: tuple[str, ...] = ()) -> None:
        self.order = order
        self._states = dict(states)
        self._seen: Seen = ()

    @classmethod
    def of(cls, task: Any, functions: MetricFunctions) -> "EvaluationMetrics":
        """Return those of a task."""
        if hasattr(task, f"{functions.framework}_loss"):
            return cls({})
        given = getattr(task, "metrics", {})
        states: dict[str, RowsState] = {}
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
        """Add a micro-batch."""
        for name, state in self._states.items():
            with _named(f"metrics[{name!r}] fails"):
                outputs, batch = seen
                state.add(outputs, batch, rows)

    def try_out(self, seen: Seen, rows: Rows) -> None:
        """Compute the metrics of one micro-batch of this worker, and forget it. Local: no collective."""
        self.begin()
        try:
            self.add(seen, rows)
            for name, state in self._states.items():
                with _named(f"metrics[{name!r}]: compute fails for the first batch alone"):
                    check_number(name, state.compute([state.parts()]))
        finally:
            self.begin()

    def computed(self, workers: Workers, collectives: Collectives) -> dict[str, float]:
        """Collective. Return the metrics of the evaluation, by name."""
        found: dict[str, float] = {}

        def compute(name: str, state: RowsState, of_workers: list[Any]) -> float:
            with _named(f"metrics[{name!r}]: compute fails"):
                return check_number(name, state.compute(of_workers))

        try:
            for name, state in self._states.items():  # one after the other: gathered rows take memory
                of_workers = on_rank_zero(state.parts(), workers, collectives)
                found[name] = run_on_rank_zero(workers, partial(compute, name, state, of_workers))
        finally:
            self.begin()
        return found


def check_number(name: str, value: Any) -> float:
    """Return what a metric computed as a number; it may be NaN."""
    if (number := as_number(value)) is None:
        array = np.asarray(value) if hasattr(value, "shape") else None
        found = type(value).__name__ if array is None else f"{array.dtype} {array.shape}"
        raise TaskError(
            f"metrics[{name!r}]: compute must return one number; found {found}",
            "Return a float, and float('nan') where the metric is not defined. Of several numbers, give each "
            "a metric of its own; an object may average them, such as by average='macro', or give one: "
            "hvdtrain.MetricObject(..., result=lambda value: value[0]).",
        )
    return number


def _states(name: str, metric: Any, task: Any, functions: MetricFunctions) -> dict[str, RowsState]:
    """Return the states of a metric by what they are logged as: one, or those of a collection of objects."""
    if isinstance(metric, str):
        metric = named_metric(name, metric, task, functions)
    metrics = {name: metric}
    if is_metric_object(metric):
        taken = taken_objects(name, metric, task, functions.framework)
        metrics = {one.name: functions.fed_object(one).gathered() for one in taken}
    return {key: RowsState(key, one, functions.to_numpy) for key, one in metrics.items()}


def _check_names(names: Sequence[str]) -> None:
    """Check the names of all metrics: those of a collection's members come to the task's own."""
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
