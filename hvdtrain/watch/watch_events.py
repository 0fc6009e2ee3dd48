"""What the watch of the workers may notice, how long it waits, and what it shares with the job."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdtrain.elastic.watch.liveness import WatchEvent

_VARIABLE = "HVDTRAIN_HOST_SILENCE_SECONDS"
_SILENCE_SECONDS = 20


@dataclass(frozen=True)
class HostLost(WatchEvent):
    """A host that does not answer."""

    remedy: str = (
        "It lost power or network, or was too busy to respond. Check it, then continue from the "
        f"newest checkpoint with --resume. {_VARIABLE} sets how long a host may be silent."
    )


@dataclass(frozen=True)
class Told(WatchEvent):
    """Another worker ends the job, and says why."""


@dataclass(frozen=True)
class Abandoned(WatchEvent):
    """The others have ended while this process was stopped."""

    problem: str = "this process was stopped, and the other workers have ended"


class Watching:
    """State that the watch and the job share.

    Attributes:
        note: a text that names the workers that cannot be watched; empty if there are none.
        on_worker_lost: called with the problem before the process ends, to record it.
        explain: returns why a collective failed, as far as the watch knows it.
    """

    def __init__(self) -> None:
        self.note = ""
        self.on_worker_lost: Callable[[str], None] = lambda problem: None
        self.explain: Callable[[], WatchEvent | None] = lambda: None


# called by the watching thread, once; it also gets the Python stacks of workers that stalled
OnEvent = Callable[[WatchEvent, str], None]


@dataclass(frozen=True)
class WatchLimits:
    """What the watch waits for, and how long.

    Attributes:
        stall_timeout: the longest time without an answer or without progress, in seconds; 0 for no limit.
        silence_seconds: the longest time without an answer of a host; 0 for no limit.
        shows_stacks: whether to ask a worker that stalled for its Python stack.
    """

    stall_timeout: float
    silence_seconds: int = _SILENCE_SECONDS
    shows_stacks: bool = False


def silence_seconds(environ: Mapping[str, str] = os.environ) -> int:
    """Return after how many seconds of silence a host counts as lost; 0 if hosts are not to be watched."""
    value = environ.get(_VARIABLE, "")
    return int(value) if value.isdecimal() else _SILENCE_SECONDS
