"""The schedule ``plateau``: when evaluations that get no better lower the learning rate."""

from pydantic import BaseModel, ConfigDict

from hvdtrain.early_stopping import MetricGoal
from hvdtrain.workers.wire_types import travels

_ABOVE = 1 + 1e-9  # 0.1 x 0.1 is a little more than 0.01


@travels
class PlateauState(BaseModel):
    """How far the learning rate was lowered, and how long the metric has not improved; a checkpoint keeps it.

    Attributes:
        metric: the metric and its better end, as ``plateau_metric`` names it.
        fraction: the learning rate as a fraction of the peak; 1 before it is lowered.
        best: the best value so far; None before the first finite one.
        best_step: when it was.
        evaluations: evaluations without improvement since then, or since the rate was last lowered.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    metric: str
    fraction: float = 1.0
    best: float | None = None
    best_step: int | None = None
    evaluations: int = 0

    def update(self, goal: MetricGoal, value: float, step: int, counts: bool = True) -> "PlateauState":
        """Return the state after an evaluation gave a value at a step.

        Args:
            goal: what ``plateau_metric`` names.
            value: the metric.
            step: steps done.
            counts: whether an evaluation without improvement counts; those in the warm-up do not.
        """
        if goal.improves(value, self.best):
            return self.model_copy(update={"best": value, "best_step": step, "evaluations": 0})
        return self.model_copy(update={"evaluations": self.evaluations + counts})

    def is_due(self, patience: int, lowest: float) -> bool:
        """Return whether ``patience`` evaluations in a row brought no improvement and it can go lower."""
        return self.evaluations >= patience and self.fraction > lowest * _ABOVE

    def lowered(self, factor: float, lowest: float) -> "PlateauState":
        """Return the state with the learning rate multiplied by a factor, and the patience anew.

        Args:
            factor: between 0 and 1.
            lowest: the fraction of the peak below which it is not lowered.
        """
        return self.model_copy(update={"fraction": max(self.fraction * factor, lowest), "evaluations": 0})

    def describe(self, goal: MetricGoal) -> str:
        """Return what has not improved for how long, in words."""
        return goal.describe_wait(self.evaluations, self.best, self.best_step)


def plateau_from(goal: MetricGoal | None, before: PlateauState | None) -> PlateauState | None:
    """Return the state that a run begins with.

    A run that continues from a checkpoint of this schedule keeps the lowered rate. If the metric is the
    same, it also keeps the best value and the patience.

    Args:
        goal: what ``plateau_metric`` names; None if the schedule is another one.
        before: what the checkpoint kept, if anything.
    """
    if goal is None:
        return None
    if before is None:
        return PlateauState(metric=str(goal))
    if before.metric == str(goal):
        return before
    return PlateauState(metric=str(goal), fraction=before.fraction)
