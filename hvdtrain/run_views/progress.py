"""How far a run is, from its records."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from hvdtrain.metric_names import LINE_FIELDS
from hvdtrain.reporting.comparison import Best, goal_of
from hvdtrain.reporting.log_records import count_of, metrics_in, number
from hvdtrain.reporting.records import EVAL, EVENT, TRAIN
from hvdtrain.run_views.event_texts import describe_event

_WINDOWS = 50  # of the last windows, how fast training is
_EVENTS = 100  # that are kept; likewise evaluations
_LONGEST_SECONDS = 1e11  # no training takes 3,000 years


class RunProgress:
    """What the records of a run say.

    Attributes:
        config: fields of the run's config.
        step, epoch, seconds, workers: those of the last record.
        train: values of the last window.
        evaluation: metrics of the last evaluation, and its step in ``evaluated_step``.
        evaluations: evaluations with their steps.
        evaluation_count: how many there were; ``evaluations`` has the last of them.
        best: best values of the metrics.
        events: events in words, with their steps.
        event_count: how many there were; ``events`` has the last of them.
        problem: what is left out of the log, in words; empty if nothing is.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: Mapping[str, Any] = config or {}
        self.step, self.epoch, self.seconds, self.workers = 0, 0.0, 0.0, 0
        self.train: dict[str, Any] = {}
        self.evaluation: dict[str, Any] = {}
        self.evaluated_step = 0
        self.evaluations: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_EVENTS)
        self.evaluation_count = 0
        self.best: dict[str, Best] = {}
        self.events: deque[tuple[int, str]] = deque(maxlen=_EVENTS)
        self.event_count = 0
        self.problem = ""
        self._places: deque[tuple[float, float, float]] = deque(maxlen=_WINDOWS)  # step, epoch, seconds

    def take(self, record: Mapping[str, Any]) -> None:
        """Take a record; one without a step is left out."""
        step = count_of(record.get("step"))
        if step is None:
            return
        self.step = step
        self.epoch = _finite(record.get("epoch"), self.epoch)
        self.seconds = _finite(record.get("seconds"), self.seconds)
        workers = record.get("workers")
        self.workers = workers if isinstance(workers, int) else self.workers
        phase = record.get("phase")
        if phase == TRAIN:
            self.train = {name: value for name, value in record.items() if name not in LINE_FIELDS}
            self._places.append((float(step), self.epoch, self.seconds))
        elif phase == EVAL:
            self._take_evaluation(step, metrics_in(record))
        elif phase == EVENT:
            self.events.append((step, describe_event(record)))
            self.event_count += 1
            self._places.clear()  # other workers have another speed

    def _take_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        self.evaluation, self.evaluated_step = metrics, step
        self.evaluations.append((step, metrics))
        self.evaluation_count += 1
        for name, value in metrics.items():
            found, known = number(value), self.best.get(name)
            if found is not None and goal_of(self.config, name).improves(found, known and known.value):
                self.best[name] = Best(found, step)

    @property
    def metrics(self) -> dict[str, Any]:
        """Means of the last window."""
        return metrics_in({"epoch": 0, **self.train})

    def fraction(self) -> float | None:
        """Return how much of the training is done, from 0 to 1; None if its length is not known."""
        done, length = self._length()
        return None if length is None else min(1.0, done / length)

    def seconds_left(self) -> float | None:
        """Return how long the rest takes at the speed of the last windows; None if that is not known."""
        seconds = self._rest_seconds()
        return seconds if seconds is not None and seconds < _LONGEST_SECONDS else None

    def _rest_seconds(self) -> float | None:
        done, length = self._length()
        if length is None:
            return None
        if done >= length:
            return 0.0
        first, last = (self._places[0], self._places[-1]) if self._places else ((0.0,) * 3, (0.0,) * 3)
        index = 0 if self._counts_steps() else 1
        if len(self._places) > 1 and last[2] > first[2] and last[index] > first[index]:
            return (length - done) * (last[2] - first[2]) / (last[index] - first[index])
        return (length - done) * self.seconds / done if done > 0 and self.seconds > 0 else None

    def _counts_steps(self) -> bool:
        return number(self.config.get("steps")) is not None and self.config.get("steps") is not None

    def _length(self) -> tuple[float, float | None]:
        """Return how far training is and its length, in steps or in epochs."""
        name, done = ("steps", float(self.step)) if self._counts_steps() else ("epochs", self.epoch)
        length = number(self.config.get(name))
        return done, length if length is not None and length > 0 and math.isfinite(length) else None


def _finite(value: Any, otherwise: float) -> float:
    found = number(value)
    return found if found is not None and math.isfinite(found) else otherwise
