"""Which value of a metric is better, and when training stops because an evaluation's gets no better."""

import math
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from hvdtrain.metric_names import SEPARATOR
from hvdtrain.storage.text import counted
from hvdtrain.workers.wire_types import travels

# metrics that are best when lowest, by the last word of their name; any other is best when highest
_LOWEST_IS_BEST = ("loss", "error", "mae", "mse", "rmse", "perplexity", "distance")


@dataclass(frozen=True)
class MetricGoal:
    """A metric of the evaluation and which end of it is better.

    Args:
        metric: name of the metric, with that of its evaluation set unless it is the first: "noisy/loss".
        highest: whether the highest value is best, or the lowest.
    """

    metric: str
    highest: bool

    @classmethod
    def parse(cls, value: object) -> "MetricGoal":
        """Read ``accuracy``, ``loss``, or ``score:min``, ``score:max`` if the name does not tell.

        Raises:
            ValueError: saying the rule.
        """
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
        """Return whether a value is better than the best before.

        None is no value. Ties, NaN and infinity do not count as an improvement.
        """
        if new is None or not math.isfinite(new):
            return False
        return old is None or (new > old if self.highest else new < old)

    def describe_wait(self, evaluations: int, best: float | None, best_step: int | None) -> str:
        """Return that it has not improved, in words.

        Args:
            evaluations: for how many evaluations.
            best: the best value so far; None if there was none.
            best_step: when it was.
        """
        text = f"{self.metric} has not improved for {counted(evaluations, 'evaluation')}"
        return text if best is None else f"{text} (best {best:.4g} at step {best_step:,})"


@travels
class EarlyStoppingState(BaseModel):
    """How long a run has been without a better value; a checkpoint keeps it.

    Attributes:
        metric: the metric and its better end, as ``early_stopping`` names it.
        best: the best value so far; None before the first finite one.
        best_step: when it was.
        evaluations: evaluations since then, or since the first if there is no best.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    metric: str
    best: float | None = None
    best_step: int | None = None
    evaluations: int = 0

    def update(self, goal: MetricGoal, value: float, step: int) -> "EarlyStoppingState":
        """Return the state after an evaluation gave a value at a step."""
        if goal.improves(value, self.best):
            return EarlyStoppingState(metric=self.metric, best=value, best_step=step)
        return self.model_copy(update={"evaluations": self.evaluations + 1})

    def should_stop(self, patience: int) -> bool:
        """Return whether ``patience`` evaluations in a row brought no improvement."""
        return self.evaluations >= patience

    def describe(self, goal: MetricGoal) -> str:
        """Return what has not improved for how long, in words."""
        return goal.describe_wait(self.evaluations, self.best, self.best_step)


def early_stopping_from(
    goal: MetricGoal | None, before: EarlyStoppingState | None
) -> EarlyStoppingState | None:
    """Return the state that a run begins with: the checkpoint's, if it has one for the same metric.

    Args:
        goal: what ``early_stopping`` names; None if the run does not stop early.
        before: what the checkpoint kept, if anything.
    """
    if goal is None:
        return None
    if before is not None and before.metric == str(goal):
        return before
    return EarlyStoppingState(metric=str(goal))
