"""What the loop does with the metrics of steps and evaluations: check, add up, report, judge them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hvdtrain.backends.base import PendingMetrics
from hvdtrain.backends.common import follow_trained
from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.callbacks import ON_STEP, ON_WINDOW, SHOULD_STOP, Callback, name_of
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import ENDINGS, ConfigError, PeerLostError, TaskError, WorkerFailure
from hvdtrain.local_results import LocalResults, divergence, is_diverged
from hvdtrain.metrics import DelayedMetrics, StepInfo, Window
from hvdtrain.session import Session
from hvdtrain.storage.text import some
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.agreement import run_on_rank_zero
from hvdtrain.workers.stragglers import StragglerWatch
from hvdtrain.workers.user_errors import where_raised

_SMALL_WEIGHT = 0.02  # a masked language model that looks at a tenth of its tokens is well above
_NAMED = 5  # skipped samples, and unused parameters, that a message names


class StepResults:
    """Takes each step's metrics when they arrive: checks them, adds them to the window, reports windows.

    Args:
        session: the run.
        plan: how the run is done with its number of workers.

    Attributes:
        is_watched: whether callbacks have seen a window end here, after which all compare what is trained.

    What it does with a step is in two parts. The first is this worker's own, and is done whole, once; the
    second tells of the step what only all workers together know.
    """

    def __init__(self, session: Session, plan: TrainingPlan) -> None:
        self._session = session
        self._plan = plan
        self._delayed = DelayedMetrics()
        self._local = None if session.config.sync_every is None else LocalResults(session, plan)
        self._is_alone = False
        self._unused_are_reported = False
        self._small_weights_are_reported = False
        self.is_watched = True  # what was changed before the first step
        self._uncounted: int | None = 0  # samples until now of which none counts; None when one has
        self._stragglers = StragglerWatch()
        session.state.window.restart_clock()
        session.read_alone = self.settle

    def launched(self, step: StepInfo, pending: PendingMetrics) -> None:
        """Collective if a step has something to name. Take a new step, and add those before it.

        The metrics of a local step are this worker's own: they are kept until the workers are equal.
        """
        is_logged = self._plan.is_due(self._session.config.log_every, step)
        self.is_watched = is_logged and ON_WINDOW in self._session.services.watched
        if self._local is None:
            self.add(self._delayed.push(step, pending))
            if self.is_watched or ON_STEP in self._session.services.watched:
                self.read_all()
        else:
            self._local.launched(step, pending)

    def synchronized(self, step: StepInfo) -> StepInfo:
        """Collective after local steps. Make the workers equal and return these steps as one, which is added.

        After any other step the workers are equal already: return it.

        Args:
            step: the step that was launched last.
        """
        if self._local is None:
            return step
        joined, metrics = self._local.synchronize(step)
        self.add([(joined, metrics)])
        return joined

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
            TaskError: If the weights of its loss or of a metric are negative or no numbers, or if callbacks
                have frozen or thawed parameters on other workers alone.
        """
        for step, metrics in steps:
            if metrics.flags.trained:  # which raises: this worker has changed nothing
                follow_trained(self._session.backend, self._session.config, step.step)
            self._add_own(step, metrics)
            if self._is_alone:
                self._session.deferred_error = None
                continue
            self._session.raise_deferred()
            if metrics.unused_parameters and not self._unused_are_reported:
                self._unused_are_reported = True
                report_unused_parameters(self._session, step, metrics)
            if metrics.statistics.skipped_samples:
                name_skipped_samples(self._session)

    def _add_own(self, step: StepInfo, metrics: StepMetrics) -> None:
        session = self._session
        check_weights(f"step {step.step}", metrics)
        self._check_counted(step, metrics)
        if is_diverged(metrics):
            if self._local is not None:
                raise self._local.divergence(step, metrics)
            raise divergence(session, self._plan, step, metrics, is_alone=self._is_alone)
        if metrics.flags:
            session.wanted |= metrics.flags
        session.data.skipped.count += metrics.statistics.skipped_samples
        session.services.hooks.take(metrics.statistics)
        session.state.window.add(metrics, step.clock_seconds)
        try:
            session.services.report.on_step(step, metrics)
        except PeerLostError as error:
            session.deferred_error = error
        if self._plan.is_due(session.config.log_every, step):
            self._close_window(step)

    def _check_counted(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Check that a sample counts in an epoch, or a shorter run: the weights of the loss are not all 0."""
        if self._uncounted is None or metrics.weights.get("loss", metrics.weight) > 0:
            self._uncounted = None
            return
        self._uncounted += step.samples - step.samples_before
        if self._uncounted >= self._session.data.size or self._plan.is_done(step):
            raise nothing_counts(f"{self._uncounted:,} samples of the training data")

    def _close_window(self, step: StepInfo) -> None:
        window, session = self._session.state.window, self._session
        speed = window.samples_per_second()
        session.services.speeds.append(speed)
        self._report_small_weights()
        data_wait, busy = window.data_wait_fraction(step.workers), window.busy.values(window.seconds)
        bad_samples, measured = window.bad_samples, session.services.hooks.values()
        with session.defer_peer_loss():
            session.services.report.on_window(
                step, window.means(), speed, data_wait, busy, bad_samples=bad_samples, measured=measured
            )
        if text := self._stragglers.take(window.busy, window.seconds):
            session.services.report.note(f"{text} (step {step.step:,})")
        session.state.window = Window(started_seconds=step.clock_seconds)

    def _report_small_weights(self) -> None:
        """Say once if the loss's weights are so small that gradients vanish when they are rounded to fp16."""
        window, config = self._session.state.window, self._session.config
        mean = window.weights.get("loss", window.weight) / window.weight
        if self._small_weights_are_reported or not 0 < mean < _SMALL_WEIGHT:
            return
        if "fp16" in (config.compression, config.precision):
            self._small_weights_are_reported = True
            self._session.services.report.note(
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


def nothing_counts(of: str) -> TaskError:
    """Return the error of a loss that has no value, as all its weights are 0."""
    return TaskError(
        f"the loss of {of} has no value: all its weights are 0",
        "Check the data's 'weights', what the task's loss returns as weights, and whether all targets are "
        "ignore_index.",
        everywhere=True,
    )


def report_unused_parameters(session: Session, step: StepInfo, metrics: StepMetrics) -> None:
    """Collective. Name the parameters that got no gradient in a step, on any worker."""
    gathered = session.backend.workers.allgather_object(metrics.unused_names)
    found = [f"{name} on rank {rank}" for rank, names in enumerate(gathered) for name in names]
    acts = "; with --stages, momentum and weight decay act on it" if session.config.stages > 1 else ""
    session.services.report.note(
        f"no gradient reached {some(found, 4)} at step {step.step}; where another worker has one, this "
        f"counts as zero{acts}"
    )


def name_skipped_samples(session: Session) -> None:
    """Collective. Name the first few of the samples that could not be read."""
    skipped = session.data.skipped
    if len(skipped.reported) >= _NAMED:
        return
    own, skipped.unreported = skipped.unreported, []
    gathered = session.backend.workers.allgather_object(own[:_NAMED])
    for text in (text for of_worker in gathered for text in of_worker):
        if text not in skipped.reported and len(skipped.reported) < _NAMED:
            session.services.report.note(f"skipped {text}")
            skipped.reported.add(text)


@dataclass(frozen=True)
class Judgement:
    """What an evaluation means: whether it is the best so far, and whether training stops early."""

    is_best: bool = False
    stops: bool = False


def judge_evaluation(session: Session, plan: TrainingPlan) -> Judgement:
    """Collective if a callback may stop training. Take note of the evaluation just done.

    What is returned is the same on every worker.
    """
    state, best, goal = session.state, session.config.keep_best, session.config.early_stopping
    is_best = False
    if best is not None:
        value = _last_value("keep_best", best, session)
        is_best = best.improves(value, state.best_value)
        state.best_value = value if is_best else state.best_value
    if goal is not None and state.early_stopping is not None:
        value = _last_value("early_stopping", goal, session)
        state.early_stopping = state.early_stopping.update(goal, value, state.progress.step)
    judgement = Judgement(is_best, stops_early(session, plan) or _stopped_by_callback(session, plan))
    _update_plateau(session, plan, is_over=judgement.stops or plan.is_done(state.progress))
    return judgement


def _update_plateau(session: Session, plan: TrainingPlan, is_over: bool) -> None:
    """Lower the learning rate of the steps to come if the schedule is plateau and nothing gets better."""
    config, state, goal = session.config, session.state, session.config.plateau_goal
    if goal is None or state.plateau is None:
        return
    step, lowest = state.progress.step, config.lr_final_fraction
    value = _last_value("plateau_metric", goal, session)
    waited = state.plateau.update(goal, value, step, counts=not plan.in_warmup(step, state.progress.samples))
    state.plateau = waited
    if not waited.is_due(config.plateau_patience, lowest):
        return
    before = session.learning_rate(plan)
    state.plateau = waited.lowered(config.plateau_factor, lowest)
    if not is_over:
        session.services.report.say(
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
    session.services.report.say(session.stopped_early)
    return True


def _stopped_by_callback(session: Session, plan: TrainingPlan) -> bool:
    """Collective if there are such callbacks. Return whether one of rank 0's ends training, and say so."""
    if not session.services.stoppers or plan.is_done(session.state.progress):
        return False
    why = ""
    with session.defer_peer_loss():
        why = run_on_rank_zero(
            session.backend.workers, lambda: _why_stopped(session), "asking callbacks whether to stop"
        )
    if why:
        session.stopped_early = f"stopped early at step {session.state.progress.step:,}: {why}"
        session.services.report.say(session.stopped_early)
    return bool(why)


def _why_stopped(session: Session) -> str:
    """Ask callbacks in order; return what the first one says that ends training. Local.

    Raises:
        WorkerFailure: If one fails whose errors end the job.
    """
    for callback in session.services.stoppers:
        try:
            if why := callback.should_stop(session.state.last_step, dict(session.state.last_eval)):
                return str(why)
        except ENDINGS:
            raise
        except BaseException as error:
            problem = f"callback {name_of(callback)} failed in {SHOULD_STOP}: {where_raised(error)}"
            if getattr(callback, "errors_end_job", True) or not isinstance(error, Exception):
                raise WorkerFailure(problem) from error
            session.services.report.note(f"{problem}; it is not asked again")
            # one that stops nothing takes its place: the other workers still wait for an answer
            session.services.stoppers = [
                Callback() if one is callback else one for one in session.services.stoppers
            ]
    return ""


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
