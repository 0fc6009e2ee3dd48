"""Options that the user set and that change nothing in this job: rank 0 says so before training."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from hvdtrain.config import Config, Layer
from hvdtrain.step_window import StepWindow
from hvdtrain.trackers import senders
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.words import counted

_OF_BUILT_IN_OPTIMIZERS = (
    *("optimizer", "momentum", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("lars_trust_coefficient", "decay_norms_and_biases"),
)


@dataclass(frozen=True)
class _Rule:
    """When fields have no effect.

    Attributes:
        fields: the fields.
        applies: whether a config leaves them without effect.
        reason: why, in words; filled in with the config's values.
    """

    fields: tuple[str, ...]
    applies: Callable[[Config], bool]
    reason: str


def _other_than(field: str, *values: str) -> Callable[[Config], bool]:
    return lambda config: getattr(config, field) not in values


_BY_OPTIMIZER = (
    _Rule(("momentum",), _other_than("optimizer", "sgd", "lars"), "optimizer {optimizer} does not use it"),
    _Rule(
        ("adam_beta1", "adam_beta2", "adam_epsilon"),
        _other_than("optimizer", "adamw", "lamb"),
        "optimizer {optimizer} does not use it",
    ),
    _Rule(
        ("lars_trust_coefficient",),
        _other_than("optimizer", "lars"),
        "optimizer {optimizer} does not use it",
    ),
    _Rule(("decay_norms_and_biases",), lambda config: not config.weight_decay, "weight_decay is 0"),
    _Rule(
        ("decay_norms_and_biases",),
        _other_than("optimizer", "sgd", "adamw"),
        "optimizer {optimizer} never decays them",
    ),
)
_OTHERS = (
    _Rule(
        ("lr_final_fraction",),
        _other_than("lr_schedule", "cosine", "linear", "cyclic", "plateau"),
        "lr_schedule {lr_schedule} does not use it",
    ),
    _Rule(
        ("lr_step_epochs", "lr_step_factor"),
        _other_than("lr_schedule", "step"),
        "lr_schedule {lr_schedule} does not use it",
    ),
    _Rule(
        ("lr_cycle_epochs",),
        _other_than("lr_schedule", "cyclic"),
        "lr_schedule {lr_schedule} does not use it",
    ),
    _Rule(
        ("plateau_metric", "plateau_patience", "plateau_factor"),
        _other_than("lr_schedule", "plateau"),
        "lr_schedule {lr_schedule} does not use it",
    ),
    _Rule(
        ("early_stopping_patience",),
        lambda config: config.early_stopping is None,
        "early_stopping names no metric",
    ),
    _Rule(
        ("outer_optimizer", "outer_learning_rate", "outer_momentum"),
        lambda config: config.sync_every is None,
        "sync_every is not given",
    ),
    _Rule(
        ("outer_learning_rate", "outer_momentum"),
        lambda config: config.sync_every is not None and config.outer_optimizer != "nesterov",
        "outer_optimizer is not nesterov",
    ),
    _Rule(("base_batch_size",), lambda config: config.lr_scaling == "none", "lr_scaling is none"),
    _Rule(
        ("lr_scaling",),
        lambda config: bool(
            config.global_batch_size and not config.base_batch_size and config.sync_every is None
        ),
        "with global_batch_size, learning_rate refers to the global batch unless base_batch_size is set",
    ),
    _Rule(
        ("lr_scaling",),
        lambda config: config.sync_every is not None and not config.base_batch_size,
        "with sync_every, learning_rate refers to each worker's batch unless base_batch_size is set",
    ),
    _Rule(("rescale_epochs",), lambda config: config.lr_scaling == "none", "lr_scaling is none"),
    _Rule(
        ("rescale_epochs",),
        lambda config: config.global_batch_size is not None and config.sync_every is None,
        "with global_batch_size, the peak does not depend on the number of workers",
    ),
    _Rule(  # of a global batch, each worker's part does
        ("rescale_epochs",),
        lambda config: (
            config.sync_every is not None and not (config.global_batch_size and config.base_batch_size)
        ),
        "with sync_every, the peak does not depend on the number of workers",
    ),
    _Rule(("track_checkpoints",), lambda config: not senders(config.track), "track names no tracker"),
    _Rule(("read_threads",), lambda config: config.read_workers > 0, "read_workers reads the samples"),
)


def given_fields(layers: Iterable[Layer], config: Config) -> frozenset[str]:
    """Return the fields that a user set.

    A config file may be that of another run, which lists all fields: those with the value of their default
    do not count.

    Args:
        layers: the user's sources, without the task's defaults.
        config: the resolved config.
    """
    return frozenset(
        name
        for layer in layers
        for name, value in layer.values.items()
        if value is not None
        and not (layer.is_file and getattr(config, name) == Config.model_fields[name].default)
    )


def unused_options(
    config: Config, given: Collection[str], *, own_optimizer: bool, has_eval_data: bool
) -> list[str]:
    """Return a note for each field that the user set and that has no effect.

    Args:
        config: the resolved config.
        given: the fields that the user set.
        own_optimizer: whether the task brings its own optimizer.
        has_eval_data: whether the task has evaluation data.
    """
    reasons: dict[str, str] = {}
    for rule in (*(() if own_optimizer else _BY_OPTIMIZER), *_OTHERS):
        if rule.applies(config):
            reasons |= dict.fromkeys(rule.fields, rule.reason)
    if own_optimizer:
        reasons |= dict.fromkeys(_OF_BUILT_IN_OPTIMIZERS, "the task brings its own optimizer")
    if not has_eval_data:
        reasons |= dict.fromkeys(("eval_every", "eval_batch_size"), "the task has no evaluation data")
    values: Mapping[str, object] = dict(config)
    return [
        f"{name} {_shown(values[name])} has no effect: {reason.format_map(values)}"
        for name, reason in reasons.items()
        if name in given
    ]


def notes_on_options(
    config: Config, given: Collection[str], plan: TrainingPlan, *, own_optimizer: bool, has_eval_data: bool
) -> list[str]:
    """Return a note for each option without effect, and for what training does not reach.

    The arguments are those of ``unused_options`` and ``unreached_parts``.
    """
    notes = unused_options(config, given, own_optimizer=own_optimizer, has_eval_data=has_eval_data)
    if plan.batch.global_batch > plan.data_size:
        times = plan.batch.global_batch / plan.data_size
        notes.append(
            f"a step has {plan.batch.global_batch:,} samples, {times:.3g} times the {plan.data_size:,} of "
            f"the training data, so that samples repeat in it; {counted(plan.steps, 'step')} in all"
        )
    return [*notes, *unreached_parts(plan), *plateau_notes(config, plan), *profile_notes(config, plan)]


def unreached_parts(plan: TrainingPlan) -> list[str]:
    """Return a note for each part of the learning rate's schedule that training does not reach."""
    rate, notes = plan.learning_rate, []
    length = counted(rate.total_epochs, "epoch")
    if rate.warmup_epochs > rate.total_epochs:
        notes.append(
            f"the warm-up of {counted(rate.warmup_epochs, 'epoch')} is longer than the training of {length}: "
            f"the learning rate ends at {rate.at(rate.total_epochs):.3g} and does not reach its peak of "
            f"{rate.peak:g}"
        )
    late = [f"{epoch:g}" for epoch in rate.step_epochs if epoch >= rate.total_epochs]
    if rate.schedule == "step" and late:
        notes.append(f"lr_step_epochs {', '.join(late)} come after the training of {length}: they do nothing")
    return notes


def plateau_notes(config: Config, plan: TrainingPlan) -> list[str]:
    """Return a note if the schedule plateau never lowers the learning rate in this training."""
    goal, patience, every = config.plateau_goal, config.plateau_patience, config.eval_every
    if goal is None or every is None:
        return []
    notes = []
    length = plan.steps if every.unit == "steps" else plan.learning_rate.total_epochs
    if (patience + 1) * every.every >= length:  # the first evaluation is the best before it
        notes.append(
            f"lr_schedule plateau lowers the learning rate after {patience + 1} evaluations at the earliest: "
            f"training ends before, with an evaluation {every.describe()}"
        )
    if goal == config.early_stopping and config.early_stopping_patience <= patience:
        notes.append(
            f"lr_schedule plateau does nothing: early_stopping ends the training after "
            f"{counted(config.early_stopping_patience, 'evaluation')} without improvement of "
            f"{goal.metric}, and plateau_patience is {patience}; it must be lower"
        )
    return notes


def profile_notes(config: Config, plan: TrainingPlan) -> list[str]:
    """Return a note if training ends before the last step that is to be recorded."""
    window = config.profile
    if window is None or window.last <= plan.steps:
        return []
    found = "nothing is recorded"
    if window.first <= plan.steps:
        reached = StepWindow(window.first, plan.steps).describe()
        found = f"{reached} and what is due then are recorded"
    return [f"profile {window}: training ends after step {plan.steps:,}: {found}"]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(list(value)) if isinstance(value, tuple) else str(value)
