"""What follows from another number of workers: the learning rate's way to its new peak, a line in the log."""

from hvdtrain.reporting.records import WorkersChange
from hvdtrain.schedule import Rescale
from hvdtrain.session import Session
from hvdtrain.training_plan import TrainingPlan, most_workers
from hvdtrain.workers.world import World


def follow_workers(session: Session) -> None:
    """Local. Note the number of workers in ``session.state``, and where the learning rate comes from.

    The same on every worker that has the same state. Called when a run starts or resumes, and in each new
    world when the state is there; it does nothing if the number is the same.
    """
    config, state, now = session.config, session.state, session.backend.workers.size
    before, state.workers = state.workers, now
    if (
        before in (0, now)
        or not config.rescale_epochs
        or (config.global_batch_size and config.sync_every is None)
        or not state.progress.samples
    ):
        return
    old = TrainingPlan.of(
        config,
        before,
        session.data_size,
        state.progress,
        most=most_workers(session.backend.workers),
        rescale=state.rescale,
    )
    peak = old.learning_rate.peak_at(session.epoch)
    state.rescale = None
    if peak != session.plan().learning_rate.peak:
        state.rescale = Rescale(peak=peak, samples=state.progress.samples)


def report_change(session: Session, world: World, pause_seconds: float) -> None:
    """Local. Report that a world took the place of another one: a line in the log, counts in the summary.

    Called by every worker, when rank 0 has its report; nothing is reported of a job's first world.

    Args:
        session: the run.
        world: the new world.
        pause_seconds: the time without training.
    """
    if world.change is None:
        return
    session.state.changes += 1
    session.state.paused_seconds += pause_seconds
    plan = session.plan()
    session.report.on_change(
        session.step_info(session.learning_rate(plan)),
        WorkersChange(
            world.change.left, world.change.joined, world.change.why, world.generation, pause_seconds
        ),
        plan.steps,
    )
