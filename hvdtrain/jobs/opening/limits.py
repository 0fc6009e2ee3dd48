"""What of a config cannot be meant: metrics and rates that are refused, options that change nothing."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from hvdtrain.backends.objective.objective import REGULARIZATION_LOSS
from hvdtrain.backends.records import OwnRates
from hvdtrain.config import Config
from hvdtrain.config.values import senders
from hvdtrain.data.eval_sets import metric_prefixes
from hvdtrain.early_stopping import SEPARATOR
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.compatibility import Job
from hvdtrain.storage.text import counted
from hvdtrain.training_plan import TrainingPlan


def check_metrics(config: Config, task: Any, eval_data: Any) -> None:
    """Check early what would else come out at the first evaluation, or never."""
    if eval_data is None:
        return
    row = FRAMEWORKS[config.framework]
    if not any(hasattr(task, name) for name in ("loss", row.loss_method)):
        raise TaskError(
            f"the task has {row.step_method} and eval_data(), but neither loss nor {row.loss_method}, which "
            "say what an evaluation computes",
            f"Add loss, or {row.loss_method}(model, batch), or let eval_data() return None.",
            everywhere=True,
        )
    goals = ("keep_best", config.keep_best), ("early_stopping", config.early_stopping)
    for field, goal in (*goals, ("plateau_metric", config.plateau_goal)):
        if goal is not None:
            _check_is_known(field, goal.metric, config, task, eval_data)


def _check_is_known(field: str, metric: str, config: Config, task: Any, eval_data: Any) -> None:
    """Check that an evaluation gives a metric, as far as that is known before."""
    # an own loss names its metrics when it is called
    own_loss = hasattr(task, FRAMEWORKS[config.framework].loss_method)
    metrics = {} if own_loss else getattr(task, "metrics", {})
    # others are refused when the model is built
    known = ["loss", *(metrics if isinstance(metrics, Mapping) else ())]
    if config.framework == "tf":  # if the model adds losses, which is known when it is called
        known.append(REGULARIZATION_LOSS)
    set_name, separator, plain = metric.rpartition(SEPARATOR)
    prefixes = metric_prefixes(eval_data).values()
    if f"{set_name}{separator}" in prefixes and (own_loss or plain in known):
        return
    remedy = "" if own_loss else f"The task has {', '.join(known)}. "
    if others := [prefix for prefix in prefixes if prefix]:
        remedy += (
            f"Metrics of the first set have plain names, those of the others begin with {', '.join(others)}."
        )
    elif own_loss:
        remedy = f"Names of metrics hold no {SEPARATOR!r}: the evaluation data are one set."
    raise ConfigError(f"{field}: there is no metric {metric!r}", remedy.strip(), everywhere=True)


def learning_rate_of(config: Config, own: OwnRates | None) -> float:
    """Return the learning rate that the job trains with."""
    if own is None:
        return config.base_learning_rate
    if (rate := config.learning_rate) is None:
        if own.base is None:
            raise TaskError(
                f"neither the config nor the task's own optimizer, {own.optimizer}, has a learning rate",
                "Set learning_rate, or give the optimizer one.",
                everywhere=True,
            )
        return own.base
    if own.base is not None and not own.is_default and not math.isclose(rate, own.base, rel_tol=1e-6):
        distinct = [f"{one:g}" for one in dict.fromkeys(own.base * factor for factor in own.factors)]
        rates = distinct[0] if len(distinct) == 1 else f"groups with {' and '.join(distinct)}"
        raise ConfigError(
            f"learning_rate is {rate:g}, and the task's own optimizer, {own.optimizer}, has {rates}",
            "Leave learning_rate out to train with the optimizer's, or make the optimizer without a rate of "
            "its own. In PyTorch, lr_scale of a parameter group is a multiple of learning_rate.",
            everywhere=True,
        )
    return rate


def unreached_parts(config: Config, plan: TrainingPlan) -> Iterator[str]:
    """Yield notes on what training as long as this does not reach, and on a batch larger than the data."""
    rate, every = plan.learning_rate, config.eval_every
    length = counted(rate.total_epochs, "epoch")
    if plan.batch.global_batch > plan.data_size:
        yield (
            f"a step has {plan.batch.global_batch:,} samples, {plan.batch.global_batch / plan.data_size:.3g} "
            f"times the {plan.data_size:,} of the training data; {counted(plan.steps, 'step')} in all"
        )
    if rate.warmup_epochs > rate.total_epochs:
        yield (
            f"the warm-up of {counted(rate.warmup_epochs, 'epoch')} is longer than the training of {length}: "
            f"the learning rate ends at {rate.at(rate.total_epochs):.3g}, below its peak of {rate.peak:g}"
        )
    if late := [f"{epoch:g}" for epoch in rate.step_epochs if epoch >= rate.total_epochs]:
        yield f"lr_step_epochs {', '.join(late)} come after the training of {length}: they do nothing"
    if config.plateau_goal is not None and every is not None:
        most = plan.steps if every.unit == "steps" else rate.total_epochs
        if (config.plateau_patience + 1) * every.every >= most:  # the first evaluation is the best before it
            yield f"training of {length} is too short for lr_schedule plateau to lower the learning rate"
    if config.profile is not None and config.profile.last > plan.steps:
        yield f"profile {config.profile}: training ends after step {plan.steps:,}"


# fmt: off
_BUILT_IN = ("optimizer", "momentum", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
             "decay_norms_and_biases")
_OUTER = ("outer_optimizer", "outer_learning_rate", "outer_momentum")
# options and the values of another one that use them
_USED_WITH: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("optimizer", ("sgd", "lars"), ("momentum",)),
    ("optimizer", ("adamw", "lamb"), ("adam_beta1", "adam_beta2", "adam_epsilon")),
    ("optimizer", ("sgd", "adamw"), ("decay_norms_and_biases",)),
    ("lr_schedule", ("cosine", "cosine_restarts", "linear", "cyclic", "plateau"), ("lr_final_fraction",)),
    ("lr_schedule", ("step",), ("lr_step_epochs", "lr_step_factor")),
    ("lr_schedule", ("cyclic", "cosine_restarts"), ("lr_cycle_epochs",)),
    ("lr_schedule", ("plateau",), ("plateau_metric", "plateau_patience", "plateau_factor")),
)
# options, when they have no effect, and why; the last row that holds counts
_UNUSED: tuple[tuple[tuple[str, ...], Callable[[Config], object], str], ...] = (
    *(
        (names, lambda c, by=by, ok=values: getattr(c, by) not in ok, f"{by} {{{by}}} does not use it")
        for by, values, names in _USED_WITH
    ),
    (("decay_norms_and_biases",), lambda c: not c.weight_decay, "weight_decay is 0"),
    (("early_stopping_patience",), lambda c: c.early_stopping is None, "early_stopping names no metric"),
    (_OUTER[1:], lambda c: c.outer_optimizer != "nesterov", "outer_optimizer is not nesterov"),
    (_OUTER, lambda c: c.sync_every is None, "sync_every is not given"),
    (("base_batch_size",), lambda c: c.lr_scaling == "none", "lr_scaling is none"),
    (("lr_scaling",), lambda c: c.global_batch_size and not c.base_batch_size,
     "with global_batch_size, learning_rate refers to the global batch unless base_batch_size is set"),
    (("lr_scaling",), lambda c: c.sync_every and not c.base_batch_size,
     "with sync_every, learning_rate refers to each worker's batch unless base_batch_size is set"),
    (("track_checkpoints",), lambda c: not senders(c.track), "track names no tracker"),
    (("read_threads",), lambda c: c.read_workers > 0, "read_workers reads the samples"),
)
# fmt: on


def unused_options(
    config: Config, given: Collection[str], *, own_optimizer: bool, has_eval_data: bool
) -> list[str]:
    """Return a note for each field that the user set and that has no effect."""
    own = dict.fromkeys(_BUILT_IN if own_optimizer else (), "the task brings its own optimizer")
    found = {name: reason for names, holds, reason in _UNUSED if holds(config) for name in names}
    reasons = {**own, **found, **own}  # the task's own optimizer comes first, and its reason counts
    if not has_eval_data:
        reasons |= dict.fromkeys(("eval_every", "eval_batch_size"), "the task has no evaluation data")
    job = Job(config)
    return [
        job.describe(f"{name} {{{name}}} has no effect: {reason}")
        for name, reason in reasons.items()
        if name in given
    ]
