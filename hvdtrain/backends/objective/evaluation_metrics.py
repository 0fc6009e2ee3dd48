"""The metrics of a whole evaluation that are no means: which a task has, and evaluating them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from hvdtrain.backends.objective.metric_objects import is_metric_object
from hvdtrain.backends.objective.named_metrics import NAMES, MetricFunctions, named_metric
from hvdtrain.backends.objective.stateful_metrics import (
    GatheredMetric,
    Rows,
    RowsState,
    SumMetric,
    on_rank_zero,
)
from hvdtrain.workers.agreement import Workers, run_on_rank_zero

# what an evaluation's call of the model gave: (outputs, batch), or nothing if there are no such metrics
Seen = tuple[Any, ...]


def is_stateful(metric: Any) -> bool:
    """Return whether a task's metric is one of a whole evaluation, and not a mean over samples."""
    is_named = isinstance(metric, str) and metric in NAMES
    return is_named or isinstance(metric, SumMetric | GatheredMetric) or is_metric_object(metric)


class EvaluationMetrics:
    """The metrics of a whole evaluation of one task."""

    def __init__(self, states: Mapping[str, RowsState], order: tuple[str, ...] = ()) -> None:
        self.order = order
        self._states = dict(states)
        self._seen: Seen = ()
        self.tried: dict[str, float] = {}  # the metrics of the last micro-batch that was tried out

    @classmethod
    def of(cls, task: Any, functions: MetricFunctions) -> "EvaluationMetrics":
        """Return those of a task."""
        if hasattr(task, f"{functions.framework}_loss"):
            return cls({})
        given = getattr(task, "metrics", {})
        states: dict[str, RowsState] = {}
        found: SumMetric | GatheredMetric
        for name, metric in given.items():
            if is_metric_object(metric):
                found = functions.fed_object(name, metric, task).gathered()
            elif is_stateful(metric):
                found = named_metric(name, metric, task, functions) if isinstance(metric, str) else metric
            else:
                continue
            states[name] = RowsState(name, found, functions.to_numpy)
        return cls(states, tuple(given) if states else ())

    def __bool__(self) -> bool:
        return bool(self._states)

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
        for state in self._states.values():
            state.add(seen[0], seen[1], rows)

    def try_out(self, seen: Seen, rows: Rows) -> None:
        """Compute the metrics of one micro-batch of this worker, and forget it. Local: no collective."""
        self.begin()
        try:
            self.tried = {name: state.tried(seen[0], seen[1], rows) for name, state in self._states.items()}
        finally:
            self.begin()

    def computed(self, workers: Workers) -> dict[str, float]:
        """Collective. Return the metrics of the evaluation, by name."""
        found: dict[str, float] = {}
        try:
            for name, state in self._states.items():  # one after the other: gathered rows take memory
                of_workers = on_rank_zero(state.parts(), workers)
                found[name] = run_on_rank_zero(workers, partial(state.value, of_workers))
        finally:
            self.begin()
        return found
