"""Which worker a job waits for in vain: rules over heartbeats, without a clock or a connection."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from hvdtrain.elastic.watch.connections import BEAT_SECONDS, Member, WorkerState
from hvdtrain.workers.activity import Activity

LONG_FACTOR = 10  # what was announced to take long may be without progress for so many stall timeouts,
LONG_SECONDS = 600.0  # and at least so long

_NAMED = 8  # workers that a message names


@dataclass(frozen=True)
class WatchEvent:
    """What the watch of the workers may notice."""

    problem: str  # who it is, and what they did last, as text
    ranks: tuple[int, ...] = ()  # who it is
    remedy: str = ""  # what to do


@dataclass(frozen=True)
class Silent(WatchEvent):
    """Workers whose processes do not answer."""

    remedy: str = (
        "Is its process stopped (docker pause, SIGSTOP, a debugger), or its host out of memory or "
        "overloaded? Continue from the newest checkpoint with --resume. --stall-timeout sets how long a "
        "worker may be silent."
    )


@dataclass(frozen=True)
class Stalled(WatchEvent):
    """Workers that answer and make no progress."""

    remedy: str = (
        "Mend what it waits for, then continue from the newest checkpoint with --resume. --debug shows its "
        "Python stack; --stall-timeout sets how long a step, or reading its data, may take."
    )


@dataclass(frozen=True)
class Left(WatchEvent):
    """A worker whose process ended without a message."""

    remedy: str = (
        "Look for os._exit() in the task and what it imports, for a crash of native code, and for the "
        "kernel's out-of-memory killer. Then continue from the newest checkpoint with --resume."
    )


@dataclass
class _Heard:
    member: Member
    at_seconds: float
    state: WorkerState | None = None

    def age_seconds(self, now_seconds: float) -> float:
        """How long the worker has made no progress."""
        since_heard = now_seconds - self.at_seconds
        return since_heard + (self.state.age_seconds if self.state else 0.0)


class Liveness:
    """What one worker, or the driver of an elastic job, knows of the others, and what follows from it."""

    def __init__(
        self, own: Member | None, others: Collection[Member], stall_timeout: float, now_seconds: float
    ) -> None:
        self._own = own
        self._stall_timeout = stall_timeout
        self._heard = {member.rank: _Heard(member, now_seconds) for member in others}

    def beat(self, rank: int, state: WorkerState, now_seconds: float) -> None:
        """Take note of a heartbeat."""
        if rank in self._heard:
            self._heard[rank].at_seconds, self._heard[rank].state = now_seconds, state

    def drop(self, rank: int) -> None:
        """Watch a worker no longer: it has ended, or said that it does."""
        self._heard.pop(rank, None)

    def is_silent(self, rank: int, now_seconds: float) -> bool:
        """Return whether a worker has not answered for a while."""
        heard = self._heard.get(rank)
        return heard is not None and now_seconds - heard.at_seconds > 5 * BEAT_SECONDS

    def forgive(self, now_seconds: float) -> None:
        """Begin all waiting anew: this process itself did not run for a while."""
        for heard in self._heard.values():
            heard.at_seconds = now_seconds

    def left(self, rank: int) -> Left | None:
        """Return the event of a worker whose connection ended without a word; None if it is not watched."""
        if rank not in self._heard:
            return None
        heard = self._heard.pop(rank)
        return Left(
            f"{heard.member} ended without a message in the middle of the job (last it was "
            f"{_last(heard.state)}): os._exit(), a crash or a kill",
            (rank,),
        )

    def judge(self, own: WorkerState | None, now_seconds: float) -> WatchEvent | None:
        """Return what is wrong now, if something is."""
        if not self._stall_timeout or not self._heard:
            return None
        return self.judge_silence(now_seconds) or self._stalled(own, now_seconds)

    def judge_silence(self, now_seconds: float, seconds: float | None = None) -> Silent | None:
        """Return the workers that have not answered for a number of seconds, by default the stall timeout."""
        seconds = self._stall_timeout if seconds is None else seconds
        silent = [one for one in list(self._heard.values()) if now_seconds - one.at_seconds >= seconds > 0]
        if not silent:
            return None
        told = "; ".join(
            f"{one.member} has not answered for {now_seconds - one.at_seconds:.0f} s: stopped or starved; "
            f"last it was {_last(one.state)}"
            for one in silent[:_NAMED]
        )
        return Silent(told + _more(silent), tuple(one.member.rank for one in silent))

    def _stalled(self, own: WorkerState | None, now_seconds: float) -> Stalled | None:
        ages = [heard.age_seconds(now_seconds) for heard in self._heard.values()]
        waited_seconds = min([own.age_seconds, *ages] if own else ages)
        if waited_seconds < self._stall_timeout:
            return None
        patience_seconds = min(5 * BEAT_SECONDS, self._stall_timeout / 2)
        states = {rank: heard.state for rank, heard in self._heard.items() if heard.state}
        late = any(now_seconds - heard.at_seconds > patience_seconds for heard in self._heard.values())
        if late or len(states) < len(self._heard):
            return None  # a worker that does not answer is named for that
        if self._own and own:
            states[self._own.rank] = own
        blamed = blame(states)
        is_long = any(states[rank].is_long for rank in blamed or states)
        limit = max(LONG_FACTOR * self._stall_timeout, LONG_SECONDS) if is_long else self._stall_timeout
        if waited_seconds < limit:
            return None
        return Stalled(self._describe(states, blamed, waited_seconds), tuple(blamed))

    def _describe(
        self, states: Mapping[int, WorkerState], blamed: Collection[int], waited_seconds: float
    ) -> str:
        members = {rank: one.member for rank, one in self._heard.items()}
        if self._own:
            members[self._own.rank] = self._own
        ranks = sorted(blamed or states)
        doing = ", ".join(f"{members[rank]} is {states[rank]}" for rank in ranks[:_NAMED]) + _more(ranks)
        if not blamed:
            return f"no worker has made progress for {waited_seconds:.0f} s: {doing}"
        return f"the others have waited for {waited_seconds:.0f} s: {doing}"


def blame(states: Mapping[int, WorkerState]) -> list[int]:
    """Return the ranks that the others wait for; empty if the workers cannot be distinguished.

    They are those in the user's code if others are not, else those that are furthest behind: the steps of
    a job are synchronous, so a worker that has got further waits for one that has not.
    """
    in_user_code = [rank for rank, state in states.items() if state.user_code]
    if 0 < len(in_user_code) < len(states):
        return sorted(in_user_code)
    if not all(state.place for state in states.values()):
        return []
    first = min(state.place for state in states.values())
    behind = [rank for rank, state in states.items() if state.place == first]
    return sorted(behind) if len(behind) < len(states) else []


def _last(state: WorkerState | None) -> str:
    return str(state) if state else str(Activity("starting", 0.0))


def _more(named: Collection[object]) -> str:
    return f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""


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
    """State that the watch and the job share."""

    def __init__(self) -> None:
        self.note = ""  # names the workers that cannot be watched
        # called with the problem before the process ends, to record it
        self.on_worker_lost: Callable[[str], None] = lambda problem: None
        # returns why a collective failed, as far as the watch knows it
        self.explain: Callable[[], WatchEvent | None] = lambda: None


# called by the watching thread, once; it also gets the Python stacks of workers that stalled
OnEvent = Callable[[WatchEvent, str], None]


@dataclass(frozen=True)
class WatchLimits:
    """What the watch waits for, and how long."""

    stall_timeout: float  # the longest time without an answer or without progress, in seconds; 0 for no limit
    silence_seconds: int = _SILENCE_SECONDS  # the longest time without an answer of a host; 0 for no limit
    shows_stacks: bool = False  # whether to ask a worker that stalled for its Python stack


def silence_seconds(environ: Mapping[str, str] = os.environ) -> int:
    """Return after how many seconds of silence a host counts as lost; 0 if hosts are not to be watched."""
    value = environ.get(_VARIABLE, "")
    return int(value) if value.isdecimal() else _SILENCE_SECONDS
