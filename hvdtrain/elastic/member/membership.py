"""A worker's part in its job: the worlds that it is told to enter, and what it tells the driver."""

from collections.abc import Mapping
from typing import Any, Protocol

from hvdtrain.elastic.watch.liveness import WatchEvent
from hvdtrain.errors import HvdtrainError
from hvdtrain.workers.world import Place, World


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
        """Return why all workers are to save and stop, in words; empty if they are not."""
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
