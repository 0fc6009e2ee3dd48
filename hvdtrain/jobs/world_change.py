"""What follows from another number of workers: the learning rate's way to its new peak, a line in the log."""

from hvdtrain.elastic.world import World
from hvdtrain.session import Session


def follow_workers(session: Session) -> None:
    """Local. Note the number of workers in ``session.state``, and where the learning rate comes from.

    The same on every worker that has the same state. Called when a run starts or resumes, and in each new
    world when the state is there; it does nothing if the number is the same.
    """
    raise NotImplementedError


def report_change(session: Session, world: World, pause_seconds: float) -> None:
    """Local. Report that a world took the place of another one: a line in the log, counts in the summary.

    Called by every worker, when rank 0 has its report; nothing is reported of a job's first world.

    Args:
        session: the run.
        world: the new world.
        pause_seconds: the time without training.
    """
    raise NotImplementedError
