"""What the plan and a resumed job say of local steps."""

from collections.abc import Sequence

from hvdtrain.config import Config
from hvdtrain.schedule import Cadence
from hvdtrain.training_plan import TrainingPlan


def describe(config: Config, plan: TrainingPlan) -> str:
    """Return what local steps mean for the run; empty if it has none."""
    if config.sync_every is None:
        return ""
    workers = plan.batch.workers
    if workers == 1:
        return f"{plan.sync_every} between outer steps of the one worker"
    late = ", ".join(_not_multiples(config))
    text = "the result depends on the number of workers"
    return f"{text}; {late} at the first synchronisation at or after its step" if late else text


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
        if cadence is not None and (cadence.unit != "steps" or int(cadence.every) % every)
    ]
