"""What the loop does with the metrics of steps and evaluations: check, add up, report, judge them."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from hvdtrain.backends.base import PendingMetrics, StepMetrics
from hvdtrain.data.eval_sets import TRAINING_DATA
from hvdtrain.data.finite import describe_not_finite
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import ConfigError, NonFiniteLossError, PeerLostError, TaskError
from hvdtrain.metrics import DelayedMetrics, StepInfo, Window, is_finite
from hvdtrain.session import Session
from hvdtrain.stragglers import StragglerWatch
from hvdtrain.training_plan import Progress, TrainingPlan

_SMALL_WEIGHT = 0.02  # a masked language model that looks at a tenth of its tokens is well above
_CALMER = "Lower the learning rate, lengthen the warm-up or clip the gradient (--clip-norm)."
_NAMED = 5  # skipped samples, and unused parameters, that a message names


class StepResults:
    """Takes each step's metrics when they arrive: checks them, adds them to the window, reports windows.

    Args:
        session: the run.
        plan: how the run is done with its number of workers.

    What it does with a step is in two parts. The first is this worker's own, and is done whole, once; the
    second tells of the step what only all workers together know.
    """

    def __init__(self, session: Session, plan: TrainingPlan) -> None:
        self._session = session
        self._plan = plan
        self._delayed = DelayedMetrics()
        self._alone: list[tuple[StepInfo, PendingMetrics]] = []
        self._is_alone = False
        self._unused_are_reported = False
        self._small_weights_are_reported = False
        self._stragglers = StragglerWatch()
        session.state.window.restart_clock()
        session.settle = self.settle

    @property
    def alone(self) -> list[StepInfo]:
        """The local steps since the workers were last equal."""
        return [step for step, _ in self._alone]

    def launched_alone(self, step: StepInfo, pending: PendingMetrics) -> None:
        """Take a local step, whose metrics are this worker's own. Local: no collective.

        They are read only to say where a loss that is not finite came from.
        """
        self._alone.append((step, pending))

    def launched(self, step: StepInfo, pending: PendingMetrics) -> None:
        """Collective if a step has something to name. Take a new step, and add those before it."""
        self.add(self._delayed.push(step, pending))

    def read_all(self) -> None:
        """Collective if a step has something to name. Add the steps that were launched and not read."""
        self.add(self._delayed.flush())

    def settle(self) -> None:
        """Add the steps that are done and were not read, after a collective failed. Local: no collective.

        What only all workers together can tell of them is left out.

        Raises:
            PeerLostError: If the metrics of a step are lost: then this worker's state is not whole.
        """
        self._is_alone = True
        self.read_all()

    def add(self, steps: Iterable[tuple[StepInfo, StepMetrics]]) -> None:
        """Collective if a step has something to name. Add steps, in order.

        Raises:
            NonFiniteLossError: naming the step and its learning rate.
            TaskError: If the weights of its loss or of a metric are negative or no numbers.
        """
        for step, metrics in steps:
            self._add_own(step, metrics)
            if self._is_alone:
                self._session.lost = None
                continue
            self._session.raise_loss()
            if metrics.unused_parameters and not self._unused_are_reported:
                self._unused_are_reported = True
                report_unused_parameters(self._session, step, metrics)
            if metrics.statistics.skipped_samples:
                name_skipped_samples(self._session)

    def _add_own(self, step: StepInfo, metrics: StepMetrics) -> None:
        session = self._session
        check_weights(f"step {step.step}", metrics)
        if _is_bad(metrics):
            if self._alone:
                raise local_divergence(session, self._plan, step, metrics, self._alone)
            raise _divergence(session, self._plan, step, metrics, is_alone=self._is_alone)
        self._alone.clear()
        if metrics.flags:
            session.wanted |= metrics.flags
        session.skipped.count += metrics.statistics.skipped_samples
        session.state.window.add(metrics, step.clock_seconds)
        try:
            session.report.on_step(step, metrics)
        except PeerLostError as error:
            session.lost = error
        if self._plan.is_due(session.config.log_every, step):
            self._close_window(step)

    @contextmanager
    def pause_timer(self) -> Iterator[None]:
        """Return a context whose time, an evaluation's or a save's, does not count in the throughput.

        It does not count either in how long this worker is busy with its steps.
        """
        paused_seconds = time.perf_counter()
        yield
        self._session.state.window.started_seconds += time.perf_counter() - paused_seconds
        self._session.backend.restart_clock()

    def _close_window(self, step: StepInfo) -> None:
        window, session = self._session.state.window, self._session
        speed = window.samples_per_second()
        session.speeds.append(speed)
        self._report_small_weights()
        data_wait, busy = window.data_wait_fraction(step.workers), window.busy.values(window.seconds)
        with session.put_off_loss():
            session.report.on_window(step, window.means(), speed, data_wait, busy)
        if text := self._stragglers.take(window.busy, window.seconds):
            session.report.note(f"{text} (step {step.step:,})")
        session.state.window = Window(started_seconds=step.clock_seconds)

    def _report_small_weights(self) -> None:
        """Say once if the loss's weights are so small that gradients vanish when they are rounded to fp16."""
        window, config = self._session.state.window, self._session.config
        mean = window.weights.get("loss", window.weight) / window.weight
        if self._small_weights_are_reported or not 0 < mean < _SMALL_WEIGHT:
            return
        if "fp16" in (config.compression, config.precision):
            self._small_weights_are_reported = True
            self._session.report.note(
                f"the weights of the loss are {mean:.2g} on average; gradients are multiplied by them before "
                "they are rounded to fp16, and small ones are lost: multiply the weights, so that their mean "
                "is near 1"
            )


def check_weights(when: str, metrics: StepMetrics) -> None:
    """Check the sums of the weights that the task's loss and metrics give.

    Args:
        when: the step or evaluation, in messages.
        metrics: its metrics.

    Raises:
        TaskError: If the weights of one of them are negative or no numbers.
    """
    for name, weight in metrics.weights.items():
        if not 0 <= weight < math.inf:
            raise TaskError(
                f"the weights of {name} must be finite and not negative; they add up to {weight:g} in {when}",
                "Check the samples' 'weights', or what the task's loss or metric returns as weights.",
                everywhere=True,
            )


def _divergence(
    session: Session, plan: TrainingPlan, step: StepInfo, metrics: StepMetrics, *, is_alone: bool
) -> NonFiniteLossError:
    """Collective, unless alone. Return the error of a loss that is not finite; such data are named."""
    loss = "nan" if metrics.overflow_exhausted else metrics.sums["loss"]
    problem = f"the loss is {loss} at step {step.step}, with learning rate {step.learning_rate:g}"
    remedy = _CALMER
    gathered = [_not_finite_data(session, plan, step)]
    if not is_alone:
        with suppress(PeerLostError):  # the loss is what is reported
            gathered = session.backend.workers.allgather_object(gathered[0])
    if found := next((text for text in gathered if text), ""):
        problem = f"{problem}: in the {TRAINING_DATA}, {found}"
        remedy = "Remove such samples, or replace the values."
    return NonFiniteLossError(problem, remedy, everywhere=True)


def local_divergence(
    session: Session,
    plan: TrainingPlan,
    step: StepInfo,
    metrics: StepMetrics,
    alone: Sequence[tuple[StepInfo, PendingMetrics]],
) -> NonFiniteLossError:
    """Collective. Return the error of a loss that is not finite on a worker in its local steps.

    Args:
        session: the run.
        plan: how the run is done.
        step: the local steps as one.
        metrics: their sums over all workers.
        alone: each local step with this worker's own metrics.
    """
    own = next(((s, m) for s, p in alone if _is_bad(m := p.read())), None)
    found = None
    if own is not None:
        at, its = own
        loss = "nan" if its.overflow_exhausted else f"{its.sums['loss']}"
        found = at.step, loss, at.learning_rate, _not_finite_data(session, plan, at)
    workers = session.backend.workers
    gathered = workers.allgather_object((workers.host, found))
    bad = [(of[0], rank, host, of) for rank, (host, of) in enumerate(gathered) if of is not None]
    if not bad:  # finite numbers whose sum is not
        return _divergence(session, plan, step, metrics, is_alone=False)
    number, rank, host, (_, loss, rate, text) = min(bad, key=lambda one: one[:2])
    where = f": in the {TRAINING_DATA}, {text}" if text else ""
    return NonFiniteLossError(
        f"the loss is {loss} at step {number} on rank {rank} ({host}), with learning rate {rate:g}, before "
        f"the workers synchronised at step {step.step}{where}",
        "Remove such samples, or replace the values." if text else _CALMER,
        everywhere=True,
    )


def _is_bad(metrics: StepMetrics) -> bool:
    return metrics.overflow_exhausted or not is_finite(metrics)


def _not_finite_data(session: Session, plan: TrainingPlan, step: StepInfo) -> str:
    """Read this worker's samples of a step again; return the first that is not finite, in words."""
    with suppress(Exception):  # the loss is what is reported
        batch = session.train_batch(plan, Progress(step.step - 1, step.samples_before))
        return describe_not_finite(batch.arrays, batch.indices) if batch else ""
    return ""


def report_unused_parameters(session: Session, step: StepInfo, metrics: StepMetrics) -> None:
    """Collective. Name the parameters that got no gradient in a step, on any worker."""
    gathered = session.backend.workers.allgather_object(metrics.unused_names)
    found = [f"{name} on rank {rank}" for rank, names in enumerate(gathered) for name in names]
    shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    session.report.note(
        f"no gradient reached {shown} at step {step.step}; zeros stand in for it, here and later"
    )


def name_skipped_samples(session: Session) -> None:
    """Collective. Name the first few of the samples that could not be read."""
    skipped = session.skipped
    if len(skipped.reported) >= _NAMED:
        return
    own, skipped.unreported = skipped.unreported, []
    gathered = session.backend.workers.allgather_object(own[:_NAMED])
    for text in (text for of_worker in gathered for text in of_worker):
        if text not in skipped.reported and len(skipped.reported) < _NAMED:
            session.report.note(f"skipped {text}")
            skipped.reported.add(text)


@dataclass(frozen=True)
class Judgement:
    """What an evaluation means: whether it is the best so far, and whether training stops early."""

    is_best: bool = False
    stops: bool = False


def judge_evaluation(session: Session, plan: TrainingPlan) -> Judgement:
    """Take note of the evaluation just done. The same on every worker."""
    state, best, goal = session.state, session.config.keep_best, session.config.early_stopping
    is_best = False
    if best is not None:
        value = _last_value("keep_best", best, session)
        is_best = best.improves(value, state.best_value)
        state.best_value = value if is_best else state.best_value
    if goal is not None and state.early_stopping is not None:
        value = _last_value("early_stopping", goal, session)
        state.early_stopping = state.early_stopping.update(goal, value, state.progress.step)
    judgement = Judgement(is_best, stops_early(session, plan))
    _update_plateau(session, plan, is_over=judgement.stops or plan.is_done(state.progress))
    return judgement


def _update_plateau(session: Session, plan: TrainingPlan, is_over: bool) -> None:
    """Lower the learning rate of the steps to come if the schedule is plateau and nothing gets better."""
    config, state, goal = session.config, session.state, session.config.plateau_goal
    if goal is None or state.plateau is None:
        return
    step, lowest = state.progress.step, config.lr_final_fraction
    value = _last_value("plateau_metric", goal, session)
    waited = state.plateau.update(goal, value, step, counts=not plan.in_warmup(state.progress))
    state.plateau = waited
    if not waited.is_due(config.plateau_patience, lowest):
        return
    before = session.learning_rate(plan)
    state.plateau = waited.lowered(config.plateau_factor, lowest)
    if not is_over:
        session.report.say(
            f"learning rate {before:.4g} -> {session.learning_rate(plan):.4g} from step {step + 1:,} on: "
            f"{waited.describe(goal)}"
        )


def stops_early(session: Session, plan: TrainingPlan) -> bool:
    """Return whether training has gone long enough without improvement, and say so."""
    config, state = session.config, session.state
    if state.early_stopping is None or config.early_stopping is None or plan.is_done(state.progress):
        return False
    if not state.early_stopping.should_stop(config.early_stopping_patience):
        return False
    why = state.early_stopping.describe(config.early_stopping)
    session.stopped_early = f"stopped early at step {state.progress.step:,}: {why}"
    session.report.say(session.stopped_early)
    return True


def _last_value(field: str, goal: MetricGoal, session: Session) -> float:
    """Return the metric that a field names, of the evaluation just done.

    Raises:
        ConfigError: If the evaluation gives no such metric.
    """
    last_eval = session.state.last_eval
    if goal.metric not in last_eval:
        raise ConfigError(
            f"{field}: there is no metric {goal.metric!r}; the evaluation gives {', '.join(last_eval)}",
            everywhere=True,
        )
    return last_eval[goal.metric]
