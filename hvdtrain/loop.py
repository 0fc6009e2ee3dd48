"""The shared loop: written once, for every framework and any number of workers.

It owns when things happen and which numbers they happen with; the backend owns the tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.backends.base import check_replicas
from hvdtrain.backends.hooks import Phase
from hvdtrain.backends.step_metrics import (
    NO_FLAGS,
    ControlFlags,
    PendingVector,
    StepStatistics,
    encode_signals,
)
from hvdtrain.callbacks import ON_STEP
from hvdtrain.data.feed import Feed
from hvdtrain.metrics import StepInfo
from hvdtrain.session import Session, StepEnd
from hvdtrain.step_end import finish_step, follow_changes, is_left_to_evaluate, save, stops_early
from hvdtrain.step_results import StepResults
from hvdtrain.training_plan import TrainingPlan


def run(session: Session, poll_signals: Callable[[], ControlFlags] = ControlFlags) -> None:
    """Collective. Train from where the run stands to the end, or to where a worker requests a stop.

    After a ``WorldChanged`` or a ``PeerLostError`` an elastic job settles the session and calls this again,
    with the workers of its next world: what was due after the last step and is not done is done first.
    """
    plan, hooks, state = session.plan(), session.services.hooks, session.state
    if _prepare(session, plan):
        hooks.after_steps(state.progress.step)
        return
    results = StepResults(session, plan)
    with hooks, session.data.train_feed(plan, state.progress) as feed:
        hooks.before_step(state.progress.step + 1)
        for batch in session.backend.to_device(feed):
            number, learning_rate = state.progress.step + 1, session.learning_rate(plan)
            hooks.on_phase(Phase.TRAINING, number)
            if results.is_watched or state.last_eval_step == number - 1:
                follow_changes(session, number)
            signals = _outgoing_signals(session, poll_signals, feed, batch.step)
            hooks.on_batch(batch)
            pending = _train_step(session, batch, learning_rate, signals)
            step = session.advance(plan, learning_rate, batch.total_weight)
            results.launched(step, pending)
            if step.step % plan.sync_every == 0 or plan.is_done(step):  # the workers are equal
                _compare(session, results.synchronized(step))
                if finish_step(session, plan, results):
                    break
            hooks.before_step(number + 1)
        hooks.after_steps(state.progress.step)
    hooks.on_phase(Phase.ENDING, state.progress.step)
    results.read_all()
    check_replicas(session.backend)
    hooks.on_workers()


def save_and_stop(session: Session) -> None:
    """Collective. Do what is due after the last step and not done, save the state, and train no further.

    For a world of an elastic job that is there to save: to stop, or because too few workers are left.
    """
    plan = session.plan()
    session.unsent = NO_FLAGS
    if _prepare(session, plan) or plan.is_done(session.state.progress):
        return
    if session.state.saved_step != session.state.progress.step:
        save(session)
    session.stopped = True


def _prepare(session: Session, plan: TrainingPlan) -> bool:
    """Collective. Begin, or continue after a change of workers: do what the last step had due.

    It depends on nothing but what all workers have in common. Return whether training has ended early.
    """
    session.services.hooks.on_phase(Phase.PREPARING)
    session.wanted, session.unsent = session.wanted.without_change(), session.unsent.without_change()
    check_replicas(session.backend)
    session.services.hooks.on_workers()
    session.start_report(plan)
    if is_left_to_evaluate(session, plan):
        session.state.last_step, session.state.step_end = session.step_info(0.0), StepEnd.STEPPED
    if session.state.is_unfinished and finish_step(session, plan, StepResults(session, plan)):
        return True
    if session.stopped_early:  # before the workers changed
        return True
    if stops_early(session, plan):
        session.services.report.note(
            "to continue, raise early_stopping_patience or set early_stopping to null"
        )
        return True
    return False


def _outgoing_signals(
    session: Session, poll_signals: Callable[[], ControlFlags], feed: Feed, step: int
) -> Sequence[float]:
    """Return what this worker sends to all of them; one whose checkpoints fail may request a stop."""
    skipped, waited_seconds = session.data.skipped_in(feed, step)
    session.unsent |= poll_signals()
    if session.services.saver.poll():
        session.unsent |= ControlFlags(stop=True)
    measured = session.services.hooks.measure(session.state.progress.step + 1)
    return encode_signals(session.unsent, StepStatistics(skipped, waited_seconds, **measured))


def _train_step(
    session: Session, batch: Any, learning_rate: float, signals: Sequence[float]
) -> PendingVector:
    """Collective. Do a step, with what callbacks have frozen or thawed after the last one.

    A worker on which they have says so in a step that it undoes, and the workers then compare. So no step has
    a collective for it, and a worker on which they have not finds it in the metrics.
    """
    backend = session.backend
    if ON_STEP in session.services.watched and any(backend.trained_change()):
        backend.undone_step(batch, learning_rate, encode_signals(ControlFlags(trained=True)))
        follow_changes(session, session.state.progress.step + 1)
    pending = backend.train_step(batch, learning_rate, signals)
    session.unsent = NO_FLAGS
    return pending


def _compare(session: Session, step: StepInfo) -> None:
    """Collective. Compare the workers' parameters if that is due after a step, or one that it stands for."""
    every, hooks = session.config.check_replicas_every, session.services.hooks
    if step.step // every > (step.step - step.steps) // every:
        hooks.on_phase(Phase.COMPARING, step.step)
        check_replicas(session.backend)
        hooks.on_phase(Phase.TRAINING, step.step)
        hooks.after_pause()
