"""The shared loop: written once, for every framework and any number of workers.

It owns when things happen and which numbers they happen with; the backend owns the tensors.
"""

import time
from collections.abc import Callable, Sequence

from hvdtrain.activity import ACTIVITY, READING_DATA, TRAINING
from hvdtrain.backends.step_signals import ControlFlags, StepStatistics, encode_signals
from hvdtrain.data.eval_sets import metric_prefixes
from hvdtrain.data.feed import Feed
from hvdtrain.metrics import DelayedMetrics, Window
from hvdtrain.replicas import check_replicas
from hvdtrain.session import Session
from hvdtrain.step_results import (
    Judgement,
    StepResults,
    check_weights,
    judge_evaluation,
    report_skipped_samples,
    stops_early,
)
from hvdtrain.training_plan import TrainingPlan

_EVALUATING = "evaluating after step"
_FIRST_STEPS = 2  # what a step compiles, it compiles in the first or, for another shape, in the second


def run(session: Session, poll_signals: Callable[[], ControlFlags] = ControlFlags) -> None:
    """Collective. Train from where the run stands to the end, or to where a worker asks to stop.

    Args:
        session: the run.
        poll_signals: returns what this worker wants all of them to do, since it was last called.

    Raises:
        TaskError: If the task's loss or a metric has the wrong shape.
        ConfigError: If the evaluation has no metric that ``keep_best``, ``early_stopping`` or
            ``plateau_metric`` names.
        WorkerFailure: If a user's callback fails.
        NonFiniteLossError: If the loss became NaN or infinite.
        ReplicaDriftError: If the workers' parameters differ.
        PeerLostError: If another worker went away.
    """
    backend, config, plan = session.backend, session.config, session.plan()
    results, delayed = StepResults(session, plan), DelayedMetrics()
    ACTIVITY.enter("starting to train", is_long=True)
    check_replicas(backend)
    session.report.on_start(plan.steps, session.state.progress.step, session.state.seconds_before)
    if _is_left_to_evaluate(session, plan):
        evaluate(session, plan)
    if stops_early(session, plan):
        session.report.note("to continue, raise early_stopping_patience or set early_stopping to null")
        return
    long_until = session.state.progress.step + _FIRST_STEPS
    ACTIVITY.enter(READING_DATA, session.state.progress.step + 1, is_long=True)
    backend.restart_clock()
    with session.train_feed(plan) as feed, session.index_trace() as trace:
        for batch in backend.to_device(trace.watch(feed)):
            number = session.state.progress.step + 1
            ACTIVITY.enter(TRAINING, number, is_long=number <= long_until)
            learning_rate = session.learning_rate(plan)
            pending = backend.train_step(batch, learning_rate, _outgoing_signals(session, poll_signals, feed))
            step = session.advance(plan, learning_rate)
            trace.trained(batch.step)
            results.add(delayed.push(step, pending))
            if step.step % config.check_replicas_every == 0:
                with ACTIVITY.during("comparing parameters after step", step.step):
                    check_replicas(backend)
                backend.restart_clock()
            judged = Judgement()
            if session.eval_data is not None and plan.is_due(config.eval_every, step):
                results.add(delayed.flush())
                with results.pause_timer():
                    evaluate(session, plan, learning_rate)
                judged = judge_evaluation(session, plan)
            if judged.is_best or judged.stops or results.flags or plan.is_due(config.save_every, step):
                results.add(delayed.flush())  # a state with a loss that is not finite is never saved
                with results.pause_timer():
                    save(session)
                stop = results.take_flags().stop
                session.stopped = stop and not judged.stops and not plan.is_done(step)
                if judged.stops or stop:
                    break
            ACTIVITY.enter(READING_DATA, number + 1)
    ACTIVITY.enter("ending training after step", session.state.progress.step, is_long=True)
    results.add(delayed.flush())
    check_replicas(backend)


def evaluate(session: Session, plan: TrainingPlan, learning_rate: float = 0.0) -> dict[str, float]:
    """Collective. Evaluate on the whole evaluation data, exactly, and report it: each set by itself.

    The model has the moving average of its weights meanwhile, if the run keeps one.

    Args:
        session: the run.
        plan: how the run is done with its number of workers.
        learning_rate: that of the last step, to be logged beside the metrics.

    Returns:
        Name to mean over the samples of its set; the same on every worker. Names of sets other than the
        first stand before those of their metrics.
    """
    backend, state = session.backend, session.state
    with ACTIVITY.during(_EVALUATING, state.progress.step):
        backend.sync_batch_norm_statistics()
        _evaluate_sets(session, plan, learning_rate)
    return state.last_eval


def _evaluate_sets(session: Session, plan: TrainingPlan, learning_rate: float) -> None:
    """Collective. Evaluate on each set of the evaluation data, and report all of them."""
    backend, state = session.backend, session.state
    total, means = Window(), dict[str, float]()
    with backend.ema_weights():
        for name, prefix in metric_prefixes(session.eval_data).items():
            session.report.status(f"evaluating {name + ' ' if name else ''}at step {state.progress.step:,}")
            window = _evaluate_set(session, plan, name)
            means |= {f"{prefix}{metric}": mean for metric, mean in window.means().items()}
            total.weight, total.ended_seconds = total.weight + window.weight, window.ended_seconds
        state.last_eval, state.last_eval_step = means, state.progress.step
        step = session.step_info(learning_rate)
        session.report.on_evaluation(step, state.last_eval, total.samples_per_second())


def _evaluate_set(session: Session, plan: TrainingPlan, name: str) -> Window:
    """Collective. Evaluate on a set of the evaluation data; return the sums over its samples."""
    backend, window, partial = session.backend, Window(), None
    with session.eval_feed(plan, name) as feed:
        for batch in backend.to_device(feed):
            ACTIVITY.enter(_EVALUATING, session.state.progress.step, is_long=True)
            partial = backend.eval_step(batch, partial)
        skipped, _ = feed.take_notes()
    signals = encode_signals(statistics=StepStatistics(skipped_samples=skipped))
    metrics = backend.eval_metrics(partial, signals).read()
    check_weights(f"the evaluation of {name!r}" if name else "the evaluation", metrics)
    report_skipped_samples(session, metrics.statistics.skipped_samples)
    window.add(metrics.without_skipped_samples(), time.perf_counter())
    return window


def save(session: Session) -> None:
    """Collective. Average the moving statistics and save; rank 0 writes, in the background."""
    with ACTIVITY.during("saving after step", session.state.progress.step):
        session.backend.sync_batch_norm_statistics()
        session.saver.save(session.backend, session.manifest())


def _outgoing_signals(
    session: Session, poll_signals: Callable[[], ControlFlags], feed: Feed
) -> Sequence[float]:
    """Return what this worker tells all of them; one whose checkpoints fail may want to stop."""
    flags = poll_signals()
    skipped, waited_seconds = feed.take_notes()
    if session.saver.poll():
        flags |= ControlFlags(stop=True)
    return encode_signals(flags, StepStatistics(skipped, waited_seconds))


def _is_left_to_evaluate(session: Session, plan: TrainingPlan) -> bool:
    """Return whether training was done before this run began, but not its last evaluation."""
    state = session.state
    evaluated = state.last_eval_step == state.progress.step
    return plan.is_done(state.progress) and session.eval_data is not None and not evaluated
