"""Parts of the plan: learning rate and optimizer, and what follows from the number of workers."""

import math
from collections.abc import Sequence

from hvdtrain.backends.records import OwnRates
from hvdtrain.config import Config
from hvdtrain.data.order import BatchPlan
from hvdtrain.early_stopping import PlateauState
from hvdtrain.schedule import ONE_CYCLE_FIRST, ONE_CYCLE_LAST, Cadence
from hvdtrain.session import Session
from hvdtrain.storage.text import counted
from hvdtrain.training_plan import TrainingPlan, most_workers


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
    """Return a note if a job with local steps continues with another number of workers."""
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


_NAMED = 8  # numbers of workers


def workers(session: Session) -> str:
    """Return how many there may be, to stand after their number; empty if that is fixed."""
    most = most_workers(session.backend.workers)
    return "" if most is None else f"; elastic: at least {session.backend.workers.least}, at most {most}"


def batch(session: Session, plan: TrainingPlan) -> str:
    """Return what the batch does when the number of workers changes; empty if that is fixed."""
    most = most_workers(session.backend.workers)
    if most is None:
        return ""
    if session.config.global_batch_size is None:
        return "; with other workers, another number a step and of steps"
    return (
        f"; micro-batches of {plan.batch.micro_batch} with any number of workers up to {most}, larger ones "
        "with a lower --max-np"
    )


def learning_rate(session: Session, plan: TrainingPlan) -> str:
    """Return how the learning rate follows the number of workers; empty if it does not."""
    rate, config, epoch, text = plan.learning_rate, session.config, session.epoch, ""
    if rate.ramp is not None and rate.peak_at(epoch) != rate.peak:
        text = f"; the peak is on its way from {rate.peak_at(epoch):g} until epoch {rate.ramp.end:g}"
    is_elastic = most_workers(session.backend.workers) is not None
    if not is_elastic or config.global_batch_size or config.lr_scaling == "none":
        return text
    length = f"over {counted(config.rescale_epochs, 'epoch')}" if config.rescale_epochs else "at once"
    return f"{text}; it follows the number of workers {length}"


def batch_norm(
    layers: int, batch: BatchPlan, numbers: range, is_synchronised: bool, leaves_out_padding: bool
) -> str:
    """Return which samples batch norm takes together.

    Args:
        layers: number of its layers.
        batch: how a step is sharded now.
        numbers: the numbers of workers that the job may have.
        is_synchronised: whether layers take the samples of all workers together.
        leaves_out_padding: whether steps give the model no padding.
    """
    samples, most = counted(batch.micro_batch, "sample"), numbers[-1]
    if not is_synchronised:
        text = f"{counted(layers, 'layer')} over each micro-batch of {samples}, with any number of workers"
        padded = "" if leaves_out_padding else _padded_with(batch, numbers)
        if not padded:
            return text
        return (
            f"warning: {text}; with {padded} padding (a repeated sample) counts in the statistics; see "
            "--sync-batch-norm"
        )
    return (
        f"warning: {counted(layers, 'layer')} over the micro-batches of {samples} of as many workers as "
        f"there are, up to {most}, so the curve depends on their number"
    )


def _padded_with(batch: BatchPlan, numbers: range) -> str:
    """Return the numbers of workers with which a step is padded, such as "3, 5, 6 workers"; empty if none."""
    if batch.micro is None:  # --batch-size: the batch follows the workers
        return ""
    found = [
        number for number in numbers if not BatchPlan.of_size(batch.global_batch, number, batch.micro).is_even
    ]
    if not found:
        return ""
    more = f" and {len(found) - _NAMED} other numbers of" if len(found) > _NAMED else ""
    return f"{', '.join(map(str, found[:_NAMED]))}{more} workers"


_GROUPS = 8  # parameter groups whose learning rates are shown


def describe_learning_rate(
    config: Config, plan: TrainingPlan, own: OwnRates | None, plateau: PlateauState | None
) -> str:
    """Return the learning rate, its warm-up and its schedule."""
    rate, base = plan.learning_rate, config.base_learning_rate
    quoted = f"{base:g}{_origin(base, own)}"
    text = quoted
    if rate.peak != base:
        text = (
            f"{rate.peak:g} = {quoted} x {rate.peak / base:g} ({config.lr_scaling} rule: "
            f"{learning_rate_of(config, plan)}, quoted for {plan.base_batch})"
        )
    if rate.warmup_epochs:
        steps = config.warmup_steps
        length = counted(steps, "step") if steps else counted(rate.warmup_epochs, "epoch")
        text += f", after a warm-up of {length}"
    lowest = f"{rate.peak * rate.final_fraction:g}"
    after = {
        "constant": "constant",
        "cosine": f"cosine to {lowest}",
        "linear": f"linear to {lowest}",
        "one_cycle": f"one cycle: from {rate.peak * ONE_CYCLE_FIRST:g} up to the peak at 30 % of the "
        f"training and down to {rate.peak * ONE_CYCLE_LAST:g}",
        "step": f"x {rate.step_factor:g} at epochs {', '.join(f'{e:g}' for e in rate.step_epochs)}",
        "cyclic": f"cycles of {counted(rate.cycle_epochs, 'epoch')} down to {lowest}",
        "plateau": _plateau(config, rate.peak, plateau),
    }
    return f"{text}, {after[rate.schedule]}{_rates_of_groups(rate.peak, own)}"


def _plateau(config: Config, peak: float, plateau: PlateauState | None) -> str:
    patience = counted(config.plateau_patience, "evaluation")
    goal = config.plateau_metric
    way = "higher" if goal.highest else "lower"
    text = f"x {config.plateau_factor:g} after {patience} in a row without a {way} {goal.metric}"
    if config.lr_final_fraction:
        text += f", down to {peak * config.lr_final_fraction:g}"
    if plateau is not None and plateau.fraction < 1:
        text += f"; lowered to {peak * max(plateau.fraction, config.lr_final_fraction):g} so far"
    return text


def _origin(base: float, own: OwnRates | None) -> str:
    """Return where the learning rate comes from, if that is not plain."""
    if own is None or own.base is None:
        return ""
    if math.isclose(base, own.base, rel_tol=1e-6):
        return " (the optimizer's own)"
    return f" (in place of the optimizer's default {own.base:g})"


def _rates_of_groups(peak: float, own: OwnRates | None) -> str:
    if own is None or set(own.factors) == {1.0}:
        return ""
    shown = [f"{peak * factor:g}" for factor in own.factors[:_GROUPS]]
    more = ", ..." if len(own.factors) > _GROUPS else ""
    return f"; {counted(len(own.factors), 'parameter group')} at {', '.join(shown)}{more}"


def describe_optimizer(config: Config, own: OwnRates | None) -> str:
    """Return the optimizer with its options."""
    text = f"{config.optimizer}{_options(config)}" if own is None else f"the task's own, {own.optimizer}"
    if config.clip_norm:
        text += f", gradient clipped to norm {config.clip_norm:g}"
    return text


def _options(config: Config) -> str:
    """Return the options of a built-in optimizer."""
    text = ""
    if config.optimizer in ("sgd", "lars") and config.momentum:
        text += f", momentum {config.momentum:g}"
    if config.optimizer == "lamb":
        text += f", betas {config.adam_beta1:g} and {config.adam_beta2:g}"
    if config.weight_decay:
        text += f", weight decay {config.weight_decay:g}"
    return text
