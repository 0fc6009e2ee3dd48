"""Options that the user set and that change nothing in this job: rank 0 says so before training."""

from collections.abc import Collection

from hvdtrain.config import Config
from hvdtrain.jobs.compatibility import unused_options
from hvdtrain.schedule import StepWindow
from hvdtrain.storage.text import counted
from hvdtrain.training_plan import TrainingPlan


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
