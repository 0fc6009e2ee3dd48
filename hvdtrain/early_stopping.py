"""Which value of a metric is better, and when training stops because an evaluation's gets no better."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict

from hvdtrain.errors import TaskError
from hvdtrain.storage.text import counted
from hvdtrain.workers.wire_types import travels

# what each line of metrics.jsonl says of its step
LINE_FIELDS = frozenset({"phase", "step", "samples", "epoch", "workers", "seconds"})
# how many samples could not be read and were skipped, if any
BAD_SAMPLES = "bad_samples"
# the most memory that a worker has had, in MiB: its process, and tensors on its GPU
PEAK_MEMORY, PEAK_DEVICE_MEMORY = "peak_memory_mib", "peak_device_memory_mib"
# the norm of the gradient before it is clipped: the mean over the steps of a window
GRADIENT_NORM = "gradient_norm"
# numbers that stand next to the metrics
MEASURES = frozenset(
    {
        *("learning_rate", "samples_per_second", "data_wait_fraction", "slowest_rank", "wait_fraction"),
        *(GRADIENT_NORM, PEAK_MEMORY, PEAK_DEVICE_MEMORY),
    }
)
# what else a line of evaluations.jsonl says
_EVALUATION_FIELDS = frozenset(
    {"checkpoint", "averaged_weights", "task", "framework", "eval_samples", BAD_SAMPLES, "time"}
)
# between the name of an evaluation set and that of its metric: "noisy/accuracy"
SEPARATOR = "/"
RESERVED = LINE_FIELDS | MEASURES | {"loss"} | _EVALUATION_FIELDS


def metrics_by_set(metrics: Mapping[str, float], sets: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the metrics of an evaluation by the names of the sets."""
    found: dict[str, dict[str, float]] = {name: {} for name in sets}
    for name, value in metrics.items():
        of_set, separator, plain = name.rpartition(SEPARATOR)
        found.setdefault(of_set if separator else sets[0], {})[plain] = value
    return found


def check_metric_names(names: Iterable[str], source: str) -> None:
    """Check that no metric has the name of another number: one of hvdtrain's, or another set's metric."""
    names = list(names)
    if name := next((name for name in names if SEPARATOR in str(name)), None):
        raise TaskError(
            f"{source}: the name {name!r} holds {SEPARATOR!r}, which stands between an evaluation set and "
            "its metric",
            f"Choose another name, such as {str(name).replace(SEPARATOR, '_')!r}.",
            everywhere=True,
        )
    if RESERVED.isdisjoint(names):
        return
    name = next(name for name in names if name in RESERVED)
    raise TaskError(
        f"{source}: {name!r} is the name of a number that hvdtrain logs itself",
        f"Choose another name, such as 'my_{name}'. Reserved: {', '.join(sorted(RESERVED))}.",
        everywhere=True,
    )


K = TypeVar("K")

# metrics that are best when lowest, by the last word of their name; any other is best when highest
_LOWEST_IS_BEST = ("loss", "error", "mae", "mse", "rmse", "perplexity", "distance")


@dataclass(frozen=True)
class MetricGoal:
    """A metric of the evaluation and which end of it is better."""

    metric: str  # name of the metric, with that of its evaluation set unless it is the first: "noisy/loss"
    highest: bool  # whether the highest value is best, or the lowest

    @classmethod
    def parse(cls, value: object) -> "MetricGoal":
        """Read ``accuracy``, ``loss``, or ``score:min``, ``score:max`` if the name does not say."""
        if isinstance(value, MetricGoal):
            return value
        metric, colon, way = str(value).partition(":")
        if not metric or (colon and way not in ("min", "max")):
            raise ValueError("must be the name of a metric, or NAME:min or NAME:max")
        highest = metric.rpartition(SEPARATOR)[2].rpartition("_")[2] not in _LOWEST_IS_BEST
        return cls(metric, way == "max" if colon else highest)

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.highest else 'min'}"

    def improves(self, new: float | None, old: float | None) -> bool:
        """Return whether a value is better than the best before."""
        # None is no value. Ties, NaN and infinity do not count as an improvement.
        if new is None or not math.isfinite(new):
            return False
        return old is None or (new > old if self.highest else new < old)

    def best_of(self, values: Mapping[K, float | None]) -> K | None:
        """Return the key of the best value, of equal ones the first; None if there is no value."""
        best: K | None = None
        for key, value in values.items():
            if self.improves(value, None if best is None else values[best]):
                best = key
        return best


@travels
class EarlyStoppingState(BaseModel):
    """How long a run has been without a better value; a checkpoint keeps it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    metric: str  # the metric and its better end, as early_stopping or plateau_metric names it
    best: float | None = None  # the best value so far; None before the first finite one
    best_step: int | None = None  # when it was
    # evaluations since then, or since the first if there is no best, or since the rate was last lowered
    evaluations: int = 0

    @classmethod
    def continued(cls, goal: MetricGoal | None, before: Self | None) -> Self | None:
        """Return the state that a run begins with: the checkpoint's if it is of the same metric."""
        if goal is None:
            return None
        is_same = before is not None and before.metric == str(goal)
        return before if is_same else cls(metric=str(goal))

    def update(self, goal: MetricGoal, value: float, step: int, counts: bool = True) -> Self:
        """Return the state after an evaluation; ``counts`` says whether one without improvement counts."""
        if goal.improves(value, self.best):
            return self.model_copy(update={"best": value, "best_step": step, "evaluations": 0})
        return self.model_copy(update={"evaluations": self.evaluations + counts})

    def should_stop(self, patience: int) -> bool:
        """Return whether ``patience`` evaluations in a row brought no improvement."""
        return self.evaluations >= patience

    def describe(self, goal: MetricGoal) -> str:
        """Return what has not improved for how long, as text."""
        text = f"{goal.metric} has not improved for {counted(self.evaluations, 'evaluation')}"
        return text if self.best is None else f"{text} (best {self.best:.4g} at step {self.best_step:,})"


_ABOVE = 1 + 1e-9  # 0.1 x 0.1 is a little more than 0.01


@travels
class PlateauState(EarlyStoppingState):
    """How far the learning rate was lowered, and for how long nothing improved; a checkpoint keeps it."""

    fraction: float = 1.0  # the learning rate as a fraction of the peak; 1 before it is lowered

    @classmethod
    def continued(cls, goal: MetricGoal | None, before: Self | None) -> Self | None:
        """Return the state that a run begins with: it keeps the lowered rate if the metric is another one."""
        found = super().continued(goal, before)
        if found is None or before is None:
            return found
        return found.model_copy(update={"fraction": before.fraction})

    def is_due(self, patience: int, lowest: float) -> bool:
        """Return whether ``patience`` evaluations in a row brought no improvement and it can go lower."""
        return self.should_stop(patience) and self.fraction > lowest * _ABOVE

    def lowered(self, factor: float, lowest: float) -> "PlateauState":
        """Return the state with the rate multiplied, but not below ``lowest``, and the patience anew."""
        return self.model_copy(update={"fraction": max(self.fraction * factor, lowest), "evaluations": 0})
