"""What the plan and a resumed job say of local steps."""

from collections.abc import Sequence

from hvdtrain.config import Config
from hvdtrain.schedule import Cadence
from hvdtrain.training_plan import TrainingPlan


def describe(config: Config, plan: TrainingPlan) -> str:
    """Return what local steps mean for the run; empty if it has none."""
    if config.sync_every is None:
        return ""
    parts = [_what_it_means(config, plan)]
    if late := _not_multiples(config):
        their = "their" if len(late) > 1 else "its"
        parts.append(f"{' and '.join(late)}: at the first synchronisation at or after {their} step")
    if config.sync_every > 1:
        parts.append(f"SIGTERM: at the next synchronisation, up to {config.sync_every} steps later")
    return "; ".join(parts)


def learning_rate_of(config: Config, plan: TrainingPlan) -> str:
    """Return what the rule of the learning rate compares with the batch that the rate is quoted for."""
    if config.sync_every is None:
        return f"global batch {plan.batch.global_batch}"
    return f"each worker's batch {-(-plan.batch.global_batch // plan.batch.workers)}"


def notes_on_resuming(config: Config, workers_before: int, workers: int) -> Sequence[str]:
    """Return a note if a job with local steps goes on with another number of workers."""
    if config.sync_every is None or workers == workers_before:
        return []
    return [
        f"local steps: the result depends on the number of workers, which was {workers_before} and is "
        f"{workers}"
    ]


def _what_it_means(config: Config, plan: TrainingPlan) -> str:
    if plan.batch.workers > 1:
        return "the result depends on the number of workers"
    if config.outer_optimizer != "nesterov":
        return "one worker, so there is nothing to average"
    return f"one worker, which takes an outer step after {Cadence(config.sync_every or 1).describe()}"


def _not_multiples(config: Config) -> list[str]:
    """Return the cadences that are not multiples of the steps between synchronisations."""
    every = config.sync_every or 1
    cadences: dict[str, Cadence | None] = {
        "log_every": config.log_every,
        "eval_every": config.eval_every,
        "save_every": config.save_every,
    }
    return [
        f"{name} {cadence}"
        for name, cadence in cadences.items()
        if cadence is not None and every > 1 and (cadence.unit != "steps" or int(cadence.every) % every)
    ]
