"""Which of several checkpoints is the best one."""

import math
from dataclasses import dataclass

# metrics that are best when lowest, by the last word of their name; any other is best when highest
_LOWEST_IS_BEST = ("loss", "error", "mae", "mse", "rmse", "perplexity", "distance")


@dataclass(frozen=True)
class Best:
    """Which checkpoint is the best one.

    Args:
        metric: name of a metric of the evaluation.
        highest: whether the highest value is best, or the lowest.
    """

    metric: str
    highest: bool

    @classmethod
    def parse(cls, value: object) -> "Best":
        """Read ``accuracy``, ``loss``, or ``score:min``, ``score:max`` where the name does not tell.

        Raises:
            ValueError: saying the rule.
        """
        if isinstance(value, Best):
            return value
        metric, colon, way = str(value).partition(":")
        if not metric or (colon and way not in ("min", "max")):
            raise ValueError("must be the name of a metric, or NAME:min or NAME:max")
        highest = metric.rpartition("_")[2] not in _LOWEST_IS_BEST
        return cls(metric, way == "max" if colon else highest)

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.highest else 'min'}"

    def improves(self, new: float | None, old: float | None) -> bool:
        """Whether a value is better than the best before; None is no value."""
        if new is None or not math.isfinite(new):
            return False
        return old is None or (new > old if self.highest else new < old)
