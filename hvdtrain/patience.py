"""When training stops because an evaluation's metric gets no better."""

from pydantic import BaseModel, ConfigDict

from hvdtrain.best import Best


class Waiting(BaseModel):
    """How long a run has waited for a better value; a checkpoint keeps it.

    Attributes:
        metric: the metric and its better end, as ``early_stopping`` names it.
        best: the best value so far; None before the first one that is a number.
        best_step: when it was.
        evaluations: evaluations since then, or since the first where there is no best.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    metric: str
    best: float | None = None
    best_step: int | None = None
    evaluations: int = 0


def waiting_from(rule: Best | None, before: Waiting | None) -> Waiting | None:
    """Give what a run waits with: what the checkpoint kept, where it waited for the same metric.

    Args:
        rule: what ``early_stopping`` names; None where the run does not stop early.
        before: what the checkpoint kept, if anything.
    """
    if rule is None:
        return None
    return before if before is not None and before.metric == str(rule) else Waiting(metric=str(rule))


def after_evaluation(waiting: Waiting, rule: Best, value: float, step: int) -> Waiting:
    """Give what a run waits with after an evaluation gave a value; NaN and infinity are no improvement."""
    if rule.improves(value, waiting.best):
        return Waiting(metric=waiting.metric, best=value, best_step=step)
    return waiting.model_copy(update={"evaluations": waiting.evaluations + 1})


def is_over(waiting: Waiting | None, patience: int) -> bool:
    """Whether a run has waited long enough: ``patience`` evaluations in a row without an improvement."""
    return waiting is not None and waiting.evaluations >= patience


def in_words(waiting: Waiting, rule: Best) -> str:
    """Say how long a run has waited for what."""
    times = "1 evaluation" if waiting.evaluations == 1 else f"{waiting.evaluations} evaluations"
    said = f"{rule.metric} has not improved for {times}"
    return said if waiting.best is None else f"{said} (best {waiting.best:.4g} at step {waiting.best_step:,})"
