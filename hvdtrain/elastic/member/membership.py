"""A worker's part in its job: the worlds that it enters, and what it reports to the driver."""

import os
from collections.abc import Mapping
from typing import Any, Protocol

from hvdtrain.elastic.member.client import Client, connect, current
from hvdtrain.elastic.watch.liveness import WatchEvent
from hvdtrain.errors import EXIT_STOPPED, HvdtrainError, JobEnded, RefusedError, Removed, Stopped
from hvdtrain.workers.world import Place, World

_CONNECT_SECONDS = 2.0


def tell_driver(error: BaseException) -> BaseException:
    """Tell the driver of this worker's elastic job how the worker ends.

    Args:
        error: what ends it.

    Returns:
        What ends it in the driver's words, which say whether this worker reports it; the same error if the
        driver says nothing.
    """
    client = current() or _connect_to_tell(error)
    if isinstance(client, JobEnded):
        return client
    if client is None or isinstance(error, JobEnded | RefusedError):
        return error
    if isinstance(error, Removed):
        client.left()
    elif isinstance(error, Stopped):
        client.done(EXIT_STOPPED)
    else:
        client.failed(error)
        if client.ended is not None and not client.ended.speaks:
            return client.ended
    return error


def _connect_to_tell(error: BaseException) -> Client | JobEnded | None:
    """Join the job only to report about an error before it: it ends once, with this message, if all have it.

    If another worker was faster, the job has ended, which is returned: that worker has reported it.
    """
    if isinstance(error, Exception) and not isinstance(error, JobEnded | RefusedError):
        try:
            return connect(
                os.environ, stall_timeout=_CONNECT_SECONDS, abort=lambda why: None, seconds=_CONNECT_SECONDS
            )
        except JobEnded as ended:
            return ended
        except Exception:
            return None
    return None


class Membership(Protocol):
    """A worker's part in an elastic job. Its methods are called by the training thread.

    Attributes:
        worker: the name of this worker's process, such as "w7".
        job: the name of the job.
        slot: this worker's number among the slots of its host, from 0.
        slots_on_host: slots of this host.
        least: with fewer workers the job waits.
        most: the most workers that the job may have.
        is_joining: whether the job trained already when this worker came.
        world: the world that this worker is in; None between worlds.
        lost_lease: why this worker may no longer write files; empty while it may.
    """

    worker: str
    job: str
    slot: int
    slots_on_host: int
    least: int
    most: int
    is_joining: bool
    world: World | None

    @property
    def lost_lease(self) -> str:
        """Why this worker may no longer write files; empty while it may."""
        ...

    def next_world(self, place: Place, *, valid: bool, values: Mapping[str, Any]) -> World:
        """Leave the world behind, say that this worker is ready and wait for the next one.

        Args:
            place: where this worker stands.
            valid: whether its state is whole.
            values: what must be equal on all workers, by the name that an error message uses.

        Raises:
            JobEnded: If the driver ended the job.
            Removed: If this worker is not in the next world.
            RefusedError: If the job does not take this worker.
        """
        ...

    def enter(self, world: World) -> None:
        """Set the environment with which Horovod enters a world."""
        ...

    def formed(self) -> None:
        """Say that Horovod is up in the world."""
        ...

    def form_failed(self, reason: str) -> None:
        """Say that Horovod did not come up in the world."""
        ...

    def synced(self, place: Place, run_dir: str) -> None:
        """Say that this worker has the whole state of the world, which is written to a run directory."""
        ...

    def change_wanted(self) -> bool:
        """Return whether the driver, or a signal, wants all workers to leave the world at the next step."""
        ...

    def stop_wanted(self) -> int:
        """Return the signal for which the driver wants all workers to save and stop; 0 if it does not."""
        ...

    def why_stop(self) -> str:
        """Return why all workers are to save and stop, as text; empty if they are not."""
        ...

    def leave(self, why: str) -> None:
        """Ask to leave the job at the next step boundary."""
        ...

    def left(self) -> None:
        """Say that this worker has left and that its process ends."""
        ...

    def failed(self, error: HvdtrainError) -> None:
        """Say that this worker ends because of an error."""
        ...

    def done(self, exit_code: int) -> None:
        """Say that training is complete, or stopped with its state saved."""
        ...

    def explain(self) -> WatchEvent | None:
        """Return why a collective failed, as far as the driver said it."""
        ...
