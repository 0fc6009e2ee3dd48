"""Finding a learning rate: a short training in which it rises until the loss diverges."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.step_metrics import ControlFlags, StepMetrics
from hvdtrain.config import Config, Layer
from hvdtrain.errors import HvdtrainError, NonFiniteLossError
from hvdtrain.host.launcher import launched_rank, output_rank
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.failures import end_if_uncaught
from hvdtrain.loop import run as run_loop
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.report import Report
from hvdtrain.session import Session
from hvdtrain.task import task_class_of, task_spec
from hvdtrain.tools.blocks import OpenRun, bench_config, opened_run
from hvdtrain.tools.output import check_writable, config_files, said_if_interrupted, show_found
from hvdtrain.tools.search.learning_rates import (
    BatchScale,
    Curve,
    LearningRates,
    Rise,
)
from hvdtrain.tools.search.options import HIGHEST_RATE, LOWEST_RATE, RISING_STEPS, RateOptions
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.activity import ACTIVITY


@dataclass
class _RisingSession(Session):
    """A run whose learning rate rises; see ``Session``."""

    rise: Rise = field(default_factory=Rise)

    def learning_rate(self, plan: TrainingPlan) -> float:
        """Return the one of the next step."""
        return self.rise.rate(self.state.progress.step)


class _CurveReport(Report):
    """A report that adds the loss of every step to a curve."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self._curve = curve

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Add a step."""
        self._curve.add(step.learning_rate, metrics.mean("loss"))


def lr_find(
    task: Any = None,
    *,
    framework: str,
    lowest_rate: float = LOWEST_RATE,
    highest_rate: float = HIGHEST_RATE,
    rising_steps: int = RISING_STEPS,
    **config: Any,
) -> LearningRates:
    """Train some steps with a learning rate that rises, and return what the losses say.

    Collective: every worker of the job calls it. Nothing is written. When it returns, the model that the task
    gave has the weights that it would begin a training with.

    Args:
        task: the task's class, an instance of it, or its name or path as ``--task`` takes it; the
            built-in task digits if not given.
        framework: "torch" or "tf".
        lowest_rate: learning rate of the first step, as the optimizer has it.
        highest_rate: learning rate of the last step.
        rising_steps: number of steps.
        config: config fields, such as ``batch_size=64``; docs/config.md lists them.

    Returns:
        What was found, the same on every worker; ``suggestion`` is what to give as ``learning_rate``.

    Raises:
        HvdtrainError: as ``hvdtrain.train`` raises it.
    """
    end_if_uncaught()
    rise = Rise(lowest_rate, highest_rate, rising_steps)
    named = {} if task is None else {"task": task_spec(task)}
    given = Layer("lr_find()", {**named, "framework": framework, **config})
    return find_rates([given], rise, task_class_of(task), keeps_state=True)


def run_lr_find(layers: list[Layer], options: RateOptions) -> None:
    """Collective. Find a learning rate, show what was found, and write it where the options say."""
    rise = Rise(options.lowest_rate, options.highest_rate, options.rising_steps)
    if not launched_rank():
        check_writable(options.json_path, read=config_files(layers))
    with said_if_interrupted():
        found = find_rates(layers, rise)
    if not output_rank():
        show_found(found.describe(), found.to_document(), options.json_path)


def find_rates(
    layers: list[Layer], rise: Rise, task_class: Any = None, *, keeps_state: bool = False
) -> LearningRates:
    """Collective. Train and return what was found; ``keeps_state``: model and optimizer are left as given."""
    curve = Curve()
    with opened_run(layers, lambda config: rising_config(config, rise), task_class) as run:
        backend = run.session.backend
        values = {one.name: getattr(run.session, one.name) for one in fields(run.session)}
        services = replace(run.session.services, report=_CurveReport(curve))
        session = _RisingSession(**{**values, "services": services}, rise=rise)
        ACTIVITY.enter("finding a learning rate", is_long=True)
        with _state_kept(backend) if keeps_state else nullcontext():
            _train(session, curve, rise)
        scale = batch_scale(run.config, session.plan(), run.session.data.place.replicas)
    notes = (*run.notes, *_notes(run))
    return LearningRates(
        run.config.task, backend.info.description, scale, curve.rates, curve.losses, curve.diverged,
        curve.steepest, rise.highest, notes,
    )  # fmt: skip


def _train(session: Session, curve: Curve, rise: Rise) -> None:
    try:
        run_loop(session, lambda: ControlFlags(stop=curve.stopped is not None))
    except NonFiniteLossError:
        if not curve.losses:
            raise
        # the step that failed follows the ones that were added, and was not reported
        curve.stopped = curve.stopped or rise.rate(len(curve.losses))


def rising_config(config: Config, rise: Rise) -> Config:
    """Return the config of the training in which the rate rises, with the job's peak."""
    check(Job(config, command="lr-find"))
    changes = {
        "steps": rise.steps, "learning_rate": config.base_learning_rate, "lr_schedule": "constant",
        "warmup_epochs": 0.0, "warmup_steps": None,
    }  # fmt: skip
    return bench_config(config).model_copy(update=changes)


def batch_scale(config: Config, plan: TrainingPlan, workers: int) -> BatchScale:
    """Return for which batch ``learning_rate`` is quoted, given the plan of a ``rising_config``."""
    factor = plan.learning_rate.peak / config.base_learning_rate
    return BatchScale(workers, plan.batch.global_batch, plan.base_batch, config.lr_scaling, factor)


def _notes(run: OpenRun) -> list[str]:
    notes, config, own = [], run.config, run.model.own_rates
    if config.resume:
        notes.append("the steps start from the initial weights, not from --resume; --init is taken")
    if own is not None and not own.is_default:
        notes.append(
            f"the task's own optimizer, {own.optimizer}, sets its learning rate: change it there, or make it "
            "without one, so that --learning-rate is taken"
        )
    if config.lr_schedule != "constant" or config.warmup_epochs or config.warmup_steps:
        notes.append("without the job's schedule and warm-up: with a warm-up, a higher rate may do")
    return notes


@contextmanager
def _state_kept(backend: Backend) -> Iterator[None]:
    """Collective. Return a context at whose end model and optimizer are as they were at its beginning."""
    pending = backend.gather_state()
    state = None if pending is None else pending.read()
    try:
        yield
    except HvdtrainError as error:
        if error.everywhere or backend.workers.size == 1:  # or the others would not take part
            backend.scatter_state(state)
        raise
    backend.scatter_state(state)
