"""What the driver of an elastic job needs of a cluster: slots, processes in them, a store for each world."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hvdtrain.host.hostfile import HostSlots


class Slot(NamedTuple):
    """A place for one worker.

    Attributes:
        host: the name of its host.
        number: its number on the host, from 0; it chooses the GPU.
    """

    host: str
    number: int

    def __str__(self) -> str:
        """Return host and number, such as "h2, slot 1"."""
        return f"{self.host}, slot {self.number}"


@dataclass(frozen=True)
class Limits:
    """What an elastic job may have, and how long its driver waits for what.

    Attributes:
        wanted: workers to start with.
        least: with fewer workers training waits, and ends after ``elastic_timeout``.
        most: workers that are never exceeded.
        start_timeout: how long the job waits for the first ``wanted`` workers, in seconds.
        elastic_timeout: how long it waits while there are fewer than ``least``, in seconds.
        silence_seconds: how long a host, or the driver, may be silent: the lease of a worker.
        reset_limit: how many worlds may break; None for any number.
        cooldown_seconds: the shortest and the longest time for which a slot that failed is left out.
    """

    wanted: int
    least: int
    most: int
    start_timeout: float = 60.0
    elastic_timeout: float = 600.0
    silence_seconds: float = 20.0
    reset_limit: int | None = None
    cooldown_seconds: tuple[float, float] = (5.0, 300.0)


class Process(Protocol):
    """A worker's process, on whatever host, as it was started."""

    def signal(self, number: int) -> None:
        """Send a signal to the worker. It does not wait."""
        ...

    def kill(self) -> None:
        """Kill the worker, and what started it here. It does not wait."""
        ...


class Store(Protocol):
    """The rendezvous of one world.

    Attributes:
        port: where it listens.
    """

    port: int

    def close(self) -> None:
        """Stop to listen, and end all connections."""
        ...


class Cluster(Protocol):
    """Where the workers of an elastic job run. None of its methods waits.

    Attributes:
        can_start: whether the driver starts workers; otherwise, such as below srun, they come by themselves.
        addresses: where the driver listens, each address and port; the driver sets it before the first start.
            Workers are told it in ``HVDTRAIN_ELASTIC``.
        listen_on: the addresses of this host at which the workers reach it; the driver listens on them only.
    """

    can_start: bool
    addresses: Sequence[tuple[str, int]]
    listen_on: Sequence[str]

    def hosts(self) -> Sequence[HostSlots]:
        """Return the hosts that there are now, in a fixed order, as far as is known."""
        ...

    def start(self, worker: str, slot: Slot, on_exit: Callable[[int], None]) -> Process:
        """Start a worker.

        Args:
            worker: the name of its process, which it is told.
            slot: where.
            on_exit: called in another thread with the exit code; that of a signal is negative.
        """
        ...

    def kill_far(self, host: str, pid: int, process_seconds: float) -> None:
        """Kill a process of another host if it can be reached, unless its number is another process's now."""
        ...

    def open_store(self, key: str, size: int) -> Store:
        """Open the rendezvous of a world.

        Args:
            key: the world's key.
            size: number of its workers.
        """
        ...

    def address_for(self, host: str) -> str:
        """Return the address under which a host reaches this one."""
        ...

    def say(self, text: str) -> None:
        """Tell the user, on the launcher's output."""
        ...
