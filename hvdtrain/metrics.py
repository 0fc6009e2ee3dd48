"""From values of steps to a logged window; named metrics are in ``backends/objective/``."""

import math
import time
from dataclasses import dataclass, field

from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.early_stopping import BAD_SAMPLES
from hvdtrain.workers.stragglers import BusyTimes
from hvdtrain.workers.wire_types import travels


@travels
@dataclass(frozen=True)
class StepInfo:
    """What the host knows of a step when it is launched.

    Attributes:
        step: steps done, this one included.
        samples_before: samples seen before it.
        samples: samples seen after it.
        epoch: passes over the training data after it.
        workers: number of workers that did it.
        learning_rate: what it was done with.
        clock_seconds: ``time.perf_counter`` when the host was done with it.
        steps: how many steps it stands for: with local steps, all since the workers last synchronised.
    """

    step: int
    samples_before: int
    samples: int
    epoch: float
    workers: int
    learning_rate: float
    clock_seconds: float
    steps: int = 1


@travels
@dataclass
class Window:
    """The steps since the last logged line."""

    sums: dict[str, float] = field(default_factory=dict)  # name to weighted sum
    weight: float = 0.0  # sum of the samples' weights
    # that of the steps before its clock was started, such as those of another process
    untimed_weight: float = 0.0
    started_seconds: float = field(default_factory=time.perf_counter)  # when it began, by time.perf_counter
    ended_seconds: float = 0.0  # when its last step was done, likewise
    waited_seconds: float = 0.0  # how long the workers waited for data, added up
    # sum of the weights of those names whose values have weights of their own, or were not in every step
    weights: dict[str, float] = field(default_factory=dict)
    busy: BusyTimes = field(default_factory=BusyTimes)  # how long each worker was busy
    bad_samples: int = 0  # how many samples could not be read and were skipped

    def restart_clock(self) -> None:
        """Begin its time now: its steps so far do not count in the throughput. Their sums stay."""
        self.started_seconds, self.untimed_weight = time.perf_counter(), self.weight
        self.waited_seconds, self.busy = 0.0, BusyTimes()

    def add(self, metrics: StepMetrics, clock_seconds: float) -> None:
        """Add the metrics of steps that were done at that time."""
        self.ended_seconds = clock_seconds
        for name in self.sums.keys() - metrics.sums.keys():  # a step of the task's own may leave a metric out
            self.weights.setdefault(name, self.weight)
        for name, value in metrics.sums.items():
            was_left_out = name not in self.sums and self.weight > 0
            if was_left_out or name in metrics.weights or name in self.weights:
                before = self.weights.get(name, self.weight if name in self.sums else 0.0)
                self.weights[name] = before + metrics.weights.get(name, metrics.weight)
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.weight += metrics.weight
        self.waited_seconds += metrics.statistics.data_wait_seconds
        self.busy.add(metrics.busy_seconds)
        self.bad_samples += metrics.statistics.skipped_samples

    def means(self) -> dict[str, float]:
        """Return the mean of every value over what counts in the window; NaN if nothing does."""
        weights = {name: self.weights.get(name, self.weight) for name in self.sums}
        return {name: self.sums[name] / weight if weight else math.nan for name, weight in weights.items()}

    def skipped(self) -> dict[str, float]:
        """Return how many samples were skipped, as it is logged; nothing if none were."""
        return {BAD_SAMPLES: self.bad_samples} if self.bad_samples else {}

    @property
    def seconds(self) -> float:
        """How long the window took."""
        return max(self.ended_seconds - self.started_seconds, 1e-9)

    def samples_per_second(self) -> float:
        """Return the throughput of all workers together in the window."""
        return (self.weight - self.untimed_weight) / self.seconds

    def data_wait_fraction(self, workers: int) -> float:
        """Return the share of the window's time that its steps waited for data: the mean over workers."""
        return min(1.0, self.waited_seconds / workers / self.seconds)
