"""What happens to the driver of an elastic job, and what it does about it: values without behaviour."""

from dataclasses import dataclass

from hvdtrain.elastic.driver.cluster import Slot
from hvdtrain.elastic.messages import FromDriver, FromWorker, Hello
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.workers.world import World

# for the workers to end by themselves when the job is over: rank 0 may wait for what it sends to trackers
END_SECONDS = 25.0


@dataclass(frozen=True)
class Arrived:
    """A worker has connected, proved that it knows the key, and said ``Hello``."""

    worker: str
    hello: Hello


@dataclass(frozen=True)
class Heard:
    """A worker has sent a message."""

    worker: str
    message: FromWorker


@dataclass(frozen=True)
class Lost:
    """The connection of a worker has ended."""

    worker: str  # whose
    # whether its host stopped to respond, so that nothing says that the process is gone
    is_unreachable: bool = False


@dataclass(frozen=True)
class Exited:
    """The process of a worker has ended; the code of a signal is negative."""

    worker: str
    code: int


@dataclass(frozen=True)
class Discovered:
    """These hosts are there now."""

    hosts: tuple[HostSlots, ...]


@dataclass(frozen=True)
class Signalled:
    """The launcher got a signal that ends the job."""

    number: int


@dataclass(frozen=True)
class StoreFailed:
    """The store of a world could not be opened."""

    reason: str


@dataclass(frozen=True)
class Woke:
    """The driver itself did not run for a number of seconds: nobody is blamed for them."""

    seconds: float


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Arrived | Heard | Lost | Exited | Discovered | Signalled | StoreFailed | Woke | Tick


@dataclass(frozen=True)
class Start:
    """Start a worker in a slot."""

    worker: str
    slot: Slot


@dataclass(frozen=True)
class Send:
    """Send a message to a worker."""

    worker: str
    message: FromDriver


@dataclass(frozen=True)
class Kill:
    """End the process of a worker for certain, by all means that there are."""

    worker: str


@dataclass(frozen=True)
class Forward:
    """Send a signal to the process of a worker."""

    worker: str
    number: int


@dataclass(frozen=True)
class OpenWorld:
    """Open a store with a new key and salt, and let all members of a world enter it."""

    # the world as each member is notified of it, in the order of ranks, without store and salt
    worlds: tuple[World, ...]


@dataclass(frozen=True)
class CloseStore:
    """Close the store of the current world."""


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class Finish:
    """The job is over: end all workers, and return an exit code."""

    exit_code: int  # the job's
    problem: str = ""  # what was found; empty if it needs no words, or if a worker says it
    remedy: str = ""  # what to do
    grace_seconds: float = END_SECONDS  # so long the workers may take to end by themselves


Action = Start | Send | Kill | Forward | OpenWorld | CloseStore | Say | Finish
