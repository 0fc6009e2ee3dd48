"""Finding a learning rate: a short training in which it rises until the loss diverges."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.backends.base import Backend
from hvdtrain.backends.step_metrics import ControlFlags, StepMetrics
from hvdtrain.config import Config, Layer
from hvdtrain.errors import HvdtrainError, NonFiniteLossError, UsageError
from hvdtrain.host.launcher import launched_rank, output_rank
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.failures import end_if_uncaught
from hvdtrain.loop import run as run_loop
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.report import Report
from hvdtrain.session import Session
from hvdtrain.task import task_class_of, task_spec
from hvdtrain.tools.blocks import OpenRun, bench_config, opened_run
from hvdtrain.tools.output import check_writable, said_if_interrupted, show_found
from hvdtrain.tools.search.options import HIGHEST_RATE, LOWEST_RATE, RISING_STEPS, RateOptions
from hvdtrain.tools.spread import check_picture, draw_rates
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.activity import ACTIVITY

VERSION = 1
_LEAST_STEPS, _MOST_STEPS = 20, 100_000
_FORGET = 0.9  # of the running mean that ends the rise, per step
_TIMES_LOWEST = 4.0  # the running mean's lowest value
_SMALL_FALL, _RECOVERY = 0.1, 0.25  # of the whole fall, and of the fall so far
_MARGIN = 0.1  # of the whole fall, by which a divergence that ends on a plateau passes the first value
_SIGMAS = 6.0  # of a mean, by which it falls where losses do not merely scatter
_MEDIAN_JUMP = 0.6745 * math.sqrt(2)  # of normally distributed losses, in their standard deviation
_WIDTHS = 50  # of the centred mean's standard deviation, in the length of the curve
_ROWS, _DIGITS, _OF_DIVERGENCE = 16, 3, 0.1
_NO_SUGGESTION = (
    "no suggestion: the loss did not fall by more than it scatters; lower --lowest-rate, take more "
    "--rising-steps or a larger batch, or check the task"
)


@dataclass(frozen=True)
class Rise:
    """A learning rate that rises exponentially from the first to the last of some steps."""

    lowest: float = LOWEST_RATE
    highest: float = HIGHEST_RATE
    steps: int = RISING_STEPS

    def __post_init__(self) -> None:
        if not (0 < self.lowest < self.highest < math.inf and _LEAST_STEPS <= self.steps <= _MOST_STEPS):
            raise UsageError(
                f"lowest_rate {self.lowest:g}, highest_rate {self.highest:g}, rising_steps {self.steps}: "
                f"rates must be finite, above 0 and rising, and steps {_LEAST_STEPS} to {_MOST_STEPS:,}",
                f"For example {LOWEST_RATE:g}, {HIGHEST_RATE:g} and {RISING_STEPS}.",
                everywhere=True,
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        part = min(step / (self.steps - 1), 1.0)
        return float(self.lowest * (self.highest / self.lowest) ** part)


@dataclass
class Curve:
    """The losses of steps whose learning rate rises. The same on every worker."""

    rates: list[float] = field(default_factory=list)  # learning rates, in order
    losses: list[float] = field(default_factory=list)  # the loss of each step, before its update
    # the learning rate at which the loss was seen to diverge; None if it was not
    stopped: float | None = None
    _sum: float = 0.0
    _lowest: float = math.inf

    def add(self, rate: float, loss: float) -> None:
        """Add a step until the loss has diverged: the mean is 4 times its lowest and above the first loss."""
        if self.stopped is not None:
            return
        if not math.isfinite(loss):
            self.stopped = rate
            return
        self.rates.append(rate)
        self.losses.append(loss)
        self._sum = _FORGET * self._sum + (1 - _FORGET) * loss
        mean = self._sum / (1 - _FORGET ** len(self.losses))
        self._lowest = min(self._lowest, mean)
        if mean > max(self._lowest + (_TIMES_LOWEST - 1) * abs(self._lowest), self.losses[0]):
            self.stopped = rate

    @property
    def diverged(self) -> float | None:
        """The learning rate at which the smoothed loss, after its lowest, passes its first value.

        What is seen to diverge has begun to do so before: a mean lags behind. If it was not seen, as the loss
        rose to a plateau, it has to pass its first value clearly. None if it did not diverge.
        """
        means = smoothed(self.losses)
        if self.stopped is None and not self._calm_lowest(means):
            return None
        lowest = means.index(min(means))
        limit = means[0] + (_MARGIN * (means[0] - means[lowest]) if self.stopped is None else 0.0)
        above = (rate for rate, mean in zip(self.rates, means, strict=True) if mean > limit)
        return next((rate for rate in above if rate > self.rates[lowest]), self.stopped)

    @property
    def steepest(self) -> float | None:
        """The learning rate at which the loss falls fastest, per factor of the rate.

        Only what comes before the lowest loss counts, and before the loss first rises by a quarter of what it
        had fallen: a fall after that is a recovery. None if the loss does not fall by more than it scatters.
        """
        means = smoothed(self.losses)
        last = min(self._calm_lowest(means), len(means) - 2)
        slopes = [means[at + 1] - means[at - 1] for at in range(1, last + 1)]
        return self.rates[1 + slopes.index(min(slopes))] if slopes and min(slopes) < 0 else None

    def _calm_lowest(self, means: Sequence[float]) -> int:
        """Return the place of the lowest mean before one that is far above it; 0 if all is noise."""
        if len(means) < 3:
            return 0
        # the median jump, unlike the mean one, does not count how losses rise where they diverge
        scatter = float(np.median(np.abs(np.diff(self.losses)))) / _MEDIAN_JUMP
        noise = _SIGMAS * scatter / math.sqrt(2 * math.sqrt(math.pi) * _width(len(means)))
        fall, lowest = means[0] - min(means), 0
        for at, mean in enumerate(means):
            fallen = means[0] - means[lowest]
            if fallen > _SMALL_FALL * fall and mean - means[lowest] > max(_RECOVERY * fallen, noise):
                break
            if mean < means[lowest]:
                lowest = at
        return lowest if means[0] - means[lowest] > noise else 0


def _width(count: int) -> float:
    return max(count / _WIDTHS, 1.0)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return each value's mean with its neighbours, weighted by a bell whose width is 1/50 of the length."""
    width = _width(len(values))
    reach = math.ceil(3 * width)
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    sums, weights = np.convolve(values, bell), np.convolve(np.ones(len(values)), bell)
    found: list[float] = (sums / weights)[reach : reach + len(values)].tolist()
    return found


class Suggestion(NamedTuple):
    """A learning rate to try: what to give as ``--learning-rate``, and the peak that the job has then."""

    reason: str
    learning_rate: float
    peak: float


class BatchScale(NamedTuple):
    """For which batch a learning rate is quoted, with the names of the JSON document."""

    workers: int
    global_batch: int
    base_batch_size: int
    lr_scaling: str
    peak_by_learning_rate: float


@dataclass(frozen=True)
class LearningRates:
    """What ``lr_find`` found. The same on every worker."""

    task: str  # the task's name or path
    device: str  # what it was computed on
    scale: BatchScale  # the batch that the rates are quoted for
    # learning rates of the steps, as the optimizer had them
    rates: Sequence[float] = field(repr=False)
    losses: Sequence[float] = field(repr=False)  # the loss of each step, before its update
    diverged: float | None  # the rate at which the loss diverged; None if it did not
    steepest: float | None  # the rate at which the smoothed loss fell fastest; None if it never fell
    highest: float  # the last rate that would have been tried
    notes: Sequence[str] = ()  # what the user should know

    @property
    def suggestions(self) -> list[Suggestion]:
        """Rates to try, the first being the first choice; empty if the curve has none."""
        if self.steepest is None:
            return []
        found, factor = [("where the loss falls fastest", self.steepest)], self.scale.peak_by_learning_rate
        if self.diverged is not None:
            found.append(("a tenth of where it diverges", _OF_DIVERGENCE * self.diverged))
        quoted = [(reason, float(f"{peak / factor:.{_DIGITS}g}")) for reason, peak in found]
        return [Suggestion(reason, rate, rate * factor) for reason, rate in quoted]

    @property
    def suggestion(self) -> float | None:
        """What to give as ``learning_rate``: the first of ``suggestions``; None if there is none."""
        return self.suggestions[0].learning_rate if self.suggestions else None

    def describe(self) -> str:
        """Return it as the text that is shown."""
        scale, means = self.scale, smoothed(self.losses)
        lines = [f"lr-find: {self.task} with {self.device}, global batch {scale.global_batch}"]
        lines += [f"  {'peak rate':>10}  {'loss':>10}  smoothed"]
        for at in range(0, len(self.rates), -(-len(self.rates) // _ROWS)):
            lines.append(f"  {self.rates[at]:>10.3g}  {self.losses[at]:>10.4g}  {means[at]:.4g}")
        if self.diverged is None:
            lines.append(
                f"the loss did not diverge up to {self.highest:g}: raise --highest-rate to find where"
            )
        else:
            lines.append(f"the loss diverged at a peak rate of {self.diverged:.3g}")
        batch = f"global batch of {scale.global_batch} (base_batch_size {scale.base_batch_size}, lr_scaling"
        times = f"{scale.lr_scaling}: the peak is {scale.peak_by_learning_rate:g} times --learning-rate):"
        lines.append(f"for a {batch} {times}" if self.suggestions else _NO_SUGGESTION)
        for one in self.suggestions:
            lines.append(f"  --learning-rate {one.learning_rate:<9g} peak {one.peak:<9.3g} {one.reason}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document."""
        steps = zip(self.rates, self.losses, smoothed(self.losses), strict=True)
        return {
            "version": VERSION,
            "task": self.task,
            "device": self.device,
            **self.scale._asdict(),
            "diverged_at": self.diverged,
            "suggestions": [one._asdict() for one in self.suggestions],
            "curve": [{"rate": rate, "loss": loss, "smoothed": mean} for rate, loss, mean in steps],
            "notes": list(self.notes),
        }


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
        check_writable(options.json_path, options.picture, layers=layers)
        check_picture(options.picture)
    with said_if_interrupted():
        found = find_rates(layers, rise)
    if not output_rank():
        show_found(found.describe(), found.to_document(), options.json_path, options.picture, draw_rates)


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
            try:
                run_loop(session, lambda: ControlFlags(stop=curve.stopped is not None))
            except NonFiniteLossError:
                if not curve.losses:
                    raise
                # the step that failed follows the ones that were added, and was not reported
                curve.stopped = curve.stopped or rise.rate(len(curve.losses))
        scale = batch_scale(run.config, session.plan(), run.session.data.place.replicas)
    notes = (*run.notes, *_notes(run))
    return LearningRates(
        run.config.task, backend.info.description, scale, curve.rates, curve.losses, curve.diverged,
        curve.steepest, rise.highest, notes,
    )  # fmt: skip


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
