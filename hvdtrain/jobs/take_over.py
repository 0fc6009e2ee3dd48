"""Another rank 0: the run directory goes from one worker of an elastic job to another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.callbacks import RunContext
from hvdtrain.elastic.world import World
from hvdtrain.jobs.run_lock import RunLock
from hvdtrain.session import Session

_HAND_OVER_SECONDS = 10.0


@dataclass(frozen=True)
class RunServices:
    """What a worker of an elastic job needs to write the run directory when it becomes rank 0.

    Attributes:
        context: what callbacks can use of the run, as ``open_run`` takes it; rank and workers may be old.
        callbacks: the user's callbacks, this worker's own objects.
        parameters: portable names of the trainable parameters.
        lock: this worker's lock, whose ``job`` is set.
        lost_lease: returns why this worker may no longer write files; empty while it may.
    """

    context: RunContext
    callbacks: Sequence[Any]
    parameters: Sequence[str]
    lock: RunLock
    lost_lease: Callable[[], str] = lambda: ""


def take_over_run(session: Session, world: World, services: RunServices) -> list[str]:
    """Local. Become the worker that writes the run directory: rank 0 of a world whose rank 0 was another.

    Called when ``session.state`` is what the world goes on from, before the world's first step; on a rank 0
    that had been rank 0 it does nothing but cut the traces of indices. Locks the directory, cuts its logs
    back to ``session.state``, appends what this worker knows and the logs lack, sets aside checkpoints of
    later steps. Sets ``session.report`` and ``session.saver``.

    Args:
        session: the run.
        world: the world, in which this worker is rank 0.
        services: what is needed to write.

    Returns:
        What to tell the user, in words.

    Raises:
        EnvironmentFault: If the directory cannot be written, or another job's run is in it.
    """
    raise NotImplementedError


def hand_over_run(
    session: Session, world: World, services: RunServices, timeout_seconds: float = _HAND_OVER_SECONDS
) -> None:
    """Local. Stop writing the run directory, so that the new rank 0 can; do nothing if this is not rank 0.

    Called when this worker was rank 0 and is not in the next world, or has another rank there, before that
    world's first collective. Waits for the checkpoint that is being written, closes the logs, releases the
    lock. Sets ``session.report`` and ``session.saver`` to those of another rank than 0.

    Args:
        session: the run.
        world: the next world, or the last one if this worker leaves.
        services: what was needed to write.
        timeout_seconds: how long to wait for the checkpoint.
    """
    raise NotImplementedError
