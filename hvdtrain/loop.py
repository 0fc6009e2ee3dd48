"""The shared loop: written once, for every framework and any number of workers.

It owns when things happen and which numbers they happen with; the backend owns the tensors.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.backends.base import PendingMetrics, probes, trained_parameters
from hvdtrain.backends.common import check_replicas, follow_trained
from hvdtrain.backends.step_metrics import NO_FLAGS, ControlFlags, StepStatistics, encode_signals
from hvdtrain.callbacks import ON_STEP
from hvdtrain.checkpoints.digest import digest_of
from hvdtrain.data.eval_sets import metric_prefixes, set_words
from hvdtrain.data.feed import Feed
from hvdtrain.errors import PeerLostError, WorldChanged
from hvdtrain.metrics import StepInfo, Window
from hvdtrain.run_state import JUDGED, SAVED, STEPPED
from hvdtrain.session import Session
from hvdtrain.step_results import (
    Judgement,
    StepResults,
    check_weights,
    judge_evaluation,
    name_skipped_samples,
    nothing_counts,
    stops_early,
)
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.activity import ACTIVITY, EVALUATING, READING_DATA, SAVING, TRAINING

_FIRST_STEPS = 2


def run(session: Session, poll_signals: Callable[[], ControlFlags] = ControlFlags) -> None:
    """Collective. Train from where the run stands to the end, or to where a worker asks to stop.

    After a ``WorldChanged`` or a ``PeerLostError`` an elastic job settles the session and calls this again,
    with the workers of its next world: what was due after the last step and is not done is done first.

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
        WorldChanged: If a worker of an elastic job asks for other workers; what the step had due is done.
    """
    backend, config, plan = session.backend, session.config, session.plan()
    if _is_over(session, plan):
        session.services.hooks.after_steps(session.state.progress.step)
        return
    results = StepResults(session, plan)
    first = session.state.progress.step + 1
    with session.services.hooks, session.data.train_feed(plan, session.state.progress) as feed:
        session.services.hooks.before_step(first)
        ACTIVITY.enter(READING_DATA, first, is_long=True)
        probes(backend).restart_clock()
        for batch in backend.to_device(feed):
            number = session.state.progress.step + 1
            ACTIVITY.enter(TRAINING, number, is_long=_may_compile(session, plan, number, first))
            learning_rate = session.learning_rate(plan)
            if results.is_watched or session.state.last_eval_step == number - 1:
                _follow_trained(session, number)
            signals = _outgoing_signals(session, poll_signals, feed, batch.step)
            session.services.hooks.on_batch(batch)
            pending = _train_step(session, batch, learning_rate, signals)
            session.unsent = NO_FLAGS
            step = session.advance(plan, learning_rate, batch.total_weight)
            results.launched(step, pending)
            if plan.synchronizes(step):
                step = results.synchronized(step)
                if _is_passed(config.check_replicas_every, step):
                    with ACTIVITY.during("comparing parameters after step", number):
                        check_replicas(backend)
                    probes(backend).restart_clock()
                if finish_step(session, plan, results):
                    break
            session.services.hooks.before_step(number + 1)
            ACTIVITY.enter(READING_DATA, number + 1)
        session.services.hooks.after_steps(session.state.progress.step)
    ACTIVITY.enter("ending training after step", session.state.progress.step, is_long=True)
    results.read_all()
    check_replicas(backend)
    session.services.hooks.on_workers()


def _train_step(
    session: Session, batch: Any, learning_rate: float, signals: Sequence[float]
) -> PendingMetrics:
    """Collective. Do a step, with what callbacks have frozen or thawed after the last one.

    A worker on which they have says so in a step that it undoes, and the workers then compare. So no step has
    a collective for it, and a worker on which they have not finds it in the metrics.
    """
    backend = session.backend
    if ON_STEP in session.services.watched and any(trained_parameters(backend).trained_change()):
        trained_parameters(backend).undone_step(
            batch, learning_rate, encode_signals(ControlFlags(trained=True))
        )
        _follow_trained(session, session.state.progress.step + 1)
    return backend.train_step(batch, learning_rate, signals)


def _may_compile(session: Session, plan: TrainingPlan, number: int, first: int) -> bool:
    """Return whether a framework may compile something in a step.

    It does so in the first step of a process and, for another shape, in the second. Local steps do so in the
    last one, too, which may have no samples for some workers.

    Args:
        session: the run.
        plan: how the run is done.
        number: the step.
        first: the first step of this process.
    """
    is_last = session.config.sync_every is not None and number == plan.steps
    return number < first + _FIRST_STEPS or is_last


def _is_passed(every: int, step: StepInfo) -> bool:
    """Return whether a step, or one of those that it stands for, is a multiple of a number of steps."""
    return step.step // every > (step.step - step.steps) // every


def _is_over(session: Session, plan: TrainingPlan) -> bool:
    """Collective. Begin, or go on after a change of workers; return whether there is nothing to train.

    What it does depends on nothing but what all workers have in common.
    """
    ACTIVITY.enter("starting to train", is_long=True)
    session.wanted, session.unsent = session.wanted.without_change(), session.unsent.without_change()
    check_replicas(session.backend)
    session.services.hooks.on_workers()
    if not session.services.has_started:
        session.services.report.on_start(
            plan.steps, session.state.progress.step, session.state.seconds_before
        )
        session.services.has_started = True
    if session.state.is_unfinished:
        if finish_step(session, plan, StepResults(session, plan)):
            return True
    elif _is_left_to_evaluate(session, plan):
        evaluate(session, plan)
    if session.stopped_early:  # before the workers changed
        return True
    if stops_early(session, plan):
        session.services.report.note(
            "to continue, raise early_stopping_patience or set early_stopping to null"
        )
        return True
    return False


def finish_step(session: Session, plan: TrainingPlan, results: StepResults) -> bool:
    """Collective. Do what is due after the last step and not done; return whether training ends with it.

    What is done is kept in the run's state, so that nothing is done twice if a worker goes away meanwhile.

    Raises:
        WorldChanged: If a worker asks for other workers, and training does not end with this step.
    """
    state = session.state
    step = state.last_step
    assert step is not None
    if state.stage == STEPPED:
        judged = Judgement()
        if session.data.evaluation is not None and plan.is_due(session.config.eval_every, step):
            results.read_all()
            with session.pause_timer():
                _evaluate(session, plan, step.learning_rate)
            judged = judge_evaluation(session, plan)
        due = plan.is_due(session.config.save_every, step)
        state.save_is_due, state.stage = judged.is_best or judged.stops or due, JUDGED
        session.raise_deferred()
    if state.save_is_due or session.wanted:
        results.read_all()  # a state with a loss that is not finite is never saved
        if state.save_is_due or session.wanted.stop or session.wanted.save:
            with session.pause_timer():
                save(session)
    state.stage = SAVED
    wanted, session.wanted = session.wanted, NO_FLAGS
    ends = bool(session.stopped_early) or plan.is_done(step)
    session.stopped = wanted.stop and not ends
    if wanted.change and not wanted.stop and not ends:
        raise WorldChanged
    return bool(session.stopped_early) or wanted.stop


def save_and_stop(session: Session) -> None:
    """Collective. Do what is due after the last step and not done, save the state, and train no further.

    For a world of an elastic job that is there to save: to stop, or because too few workers are left.

    Raises:
        PeerLostError: If another worker went away.
    """
    plan = session.plan()
    session.unsent = NO_FLAGS
    if _is_over(session, plan) or plan.is_done(session.state.progress):
        return
    if session.state.saved_step != session.state.progress.step:
        save(session)
    session.stopped = True


def settle(session: Session) -> None:
    """Bring the run's numbers to where its state is, after a collective failed. Local: no collective.

    The metrics of a step that was done are read, added and reported; they were reduced in the step.

    Raises:
        PeerLostError: If they are lost: then this worker's state is not whole.
        NonFiniteLossError: If the loss became NaN or infinite.
    """
    session.read_alone()
    session.deferred_error = None


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
    _evaluate(session, plan, learning_rate)
    session.raise_deferred()
    return session.state.last_eval


def _evaluate(session: Session, plan: TrainingPlan, learning_rate: float) -> None:
    """Collective. Evaluate and report; a collective of a callback that fails is deferred."""
    skipped = session.data.skipped.count
    try:
        with ACTIVITY.during(EVALUATING, session.state.progress.step):
            _combine_state(session)
            _evaluate_sets(session, plan, learning_rate)
    except PeerLostError:
        session.data.skipped.count = skipped  # the evaluation is done again
        raise


def _evaluate_sets(session: Session, plan: TrainingPlan, learning_rate: float) -> None:
    """Collective. Evaluate on each set of the evaluation data, and report all of them."""
    backend, state = session.backend, session.state
    total, means = Window(), dict[str, float]()
    with backend.ema_weights():
        for name, prefix in metric_prefixes(session.data.evaluation).items():
            session.services.report.status(
                f"evaluating {name + ' ' if name else ''}at step {state.progress.step:,}"
            )
            window = _evaluate_set(session, plan, name)
            means |= {f"{prefix}{metric}": mean for metric, mean in window.means().items()}
            total.weight, total.ended_seconds = total.weight + window.weight, window.ended_seconds
            total.bad_samples += window.bad_samples
        state.last_eval, state.last_eval_step = means, state.progress.step
        step = session.step_info(learning_rate)
        with session.defer_peer_loss():
            session.services.report.on_evaluation(
                step,
                state.last_eval,
                total.samples_per_second(),
                total.bad_samples,
                measured=session.services.hooks.values(),
            )


def _evaluate_set(session: Session, plan: TrainingPlan, name: str) -> Window:
    """Collective. Evaluate on a set of the evaluation data; return the sums over its samples."""
    backend, window, partial = session.backend, Window(), None
    with session.data.eval_feed(plan, name) as feed:
        for batch in backend.to_device(feed):
            ACTIVITY.enter(EVALUATING, session.state.progress.step, is_long=True)
            partial = backend.eval_step(batch, partial)
        skipped, _ = session.data.skipped_in(feed)
    signals = encode_signals(statistics=StepStatistics(skipped_samples=skipped))
    metrics = backend.eval_metrics(partial, signals).read()
    check_weights(f"the evaluation of {name!r}" if name else "the evaluation", metrics)
    if not metrics.weights.get("loss", metrics.weight):
        raise nothing_counts(f"the {set_words(name)}")
    if metrics.statistics.skipped_samples:
        session.data.skipped.count += metrics.statistics.skipped_samples
        name_skipped_samples(session)
    window.add(metrics.without_skipped_samples(), time.perf_counter())
    return window


def save(session: Session) -> None:
    """Collective. Give all workers the state that is saved, and save; rank 0 writes, in the background."""
    with ACTIVITY.during(SAVING, session.state.progress.step):
        _follow_trained(session, session.state.progress.step + 1)
        _combine_state(session)
        backend, config, averaged = session.backend, session.config, session.config.ema_decay is not None
        with backend.ema_weights():
            outputs = digest_of(backend, config, session.services.forms, averaged)
        session.services.saver.save(backend, session.manifest().model_copy(update={"outputs": outputs}))
    session.state.save_is_due, session.state.saved_step = False, session.state.progress.step


def _follow_trained(session: Session, number: int) -> None:
    """Collective. Follow what callbacks have frozen or thawed since the last step."""
    if note := follow_trained(session.backend, session.config, number):
        session.services.report.note(note)
        probes(session.backend).restart_clock()


def _combine_state(session: Session) -> None:
    """Collective. Give all workers one state of what no optimizer updates: what is evaluated is saved."""
    if late := session.backend.sync_statistics():
        session.services.report.note(
            f"training also changes {', '.join(late)}, on each worker by itself: from here on, all take rank "
            "0's before each evaluation and save; the task's state_reductions can combine them"
        )


def _outgoing_signals(
    session: Session, poll_signals: Callable[[], ControlFlags], feed: Feed, step: int
) -> Sequence[float]:
    """Return what this worker tells all of them; one whose checkpoints fail may want to stop."""
    flags = poll_signals() | session.unsent
    skipped, waited_seconds = session.data.skipped_in(feed, step)
    if session.services.saver.poll():
        flags |= ControlFlags(stop=True)
    session.unsent = flags
    measured = session.services.hooks.measure(session.state.progress.step + 1)
    return encode_signals(flags, StepStatistics(skipped, waited_seconds, **measured))


def _is_left_to_evaluate(session: Session, plan: TrainingPlan) -> bool:
    """Return whether training was done before this run began, but not its last evaluation."""
    state = session.state
    evaluated = state.last_eval_step == state.progress.step
    return plan.is_done(state.progress) and session.data.evaluation is not None and not evaluated
