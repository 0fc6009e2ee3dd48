"""The watch of a job: connections to rank 0, and rules over heartbeats on who is waited for in vain."""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hvdtrain.elastic.links import LineConnection, Links, connect
from hvdtrain.host.hostfile import own_addresses, reachable_by_others
from hvdtrain.workers.activity import Activity, ActivityMark
from hvdtrain.workers.agreement import Workers

BEAT_SECONDS = 1.0

_MAX_LINE_BYTES = 1 << 18
_LOOK_AFTER_SECONDS = 2.0  # an activity that is older than this is looked at more closely
_CONNECT_SECONDS = 5.0  # for each address of rank 0
_MAX_ADDRESSES = 3  # addresses of rank 0 to try, one after the other
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Member:
    """A worker of the job as its watch knows it."""

    rank: int  # its rank
    host: str  # the name of its host
    # what distinguishes its host, and the numbering of processes there, from others of the same name
    machine: str = ""
    pid: int = 0  # its process
    process_seconds: float = 0.0  # when its process started, as the system counts it

    def __str__(self) -> str:
        """Return rank and host, such as "rank 2 on h2"."""
        return f"rank {self.rank} on {self.host}"

    def shares_host(self, other: "Member") -> bool:
        """Return whether both workers run on one host and see each other's processes."""
        return (self.host, self.machine) == (other.host, other.machine)


def describe_host(rank: int, members: Collection[Member]) -> str:
    """Return the host of a worker with all ranks on it, such as "host h2 (ranks 2, 3)"."""
    own = next(member for member in members if member.rank == rank)
    ranks = [member.rank for member in members if member.shares_host(own)]
    return f"host {own.host} ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"


def machine_id() -> str:
    """Return what identifies this host, and the numbering of its processes; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def gather_members(workers: Workers) -> list[Member]:
    """Collective. Return all workers, in the order of ranks."""
    own = Member(workers.rank, workers.host, machine_id(), os.getpid(), psutil.Process().create_time())
    return [Member(**fields) for fields in workers.allgather_object(asdict(own))]


def connect_workers(
    workers: Workers, members: list[Member], silence_seconds: int
) -> tuple[dict[socket.socket, Member], list[Member]]:
    """Collective. Connect every worker to rank 0; return this one's connections, and who has none.

    Rank 0 listens only during this call, on the job's network or, if all workers run on one host, on the
    loopback interface. It takes only connections that prove a key, which the workers receive by a collective.
    """
    everyone = workers.allgather_object(own_addresses())
    is_one_host = all(member.shares_host(members[0]) for member in members)
    own = [_LOOPBACK] if is_one_host else reachable_by_others(everyone[0], everyone[1:])[:_MAX_ADDRESSES]
    key, connections = secrets.token_hex(), dict[socket.socket, Member]()
    with ExitStack() as stack:
        links: Links | None = None
        if workers.rank == 0:
            links = Links(own or [_LOOPBACK], key, silence_seconds, expected=len(members))
            stack.callback(links.close_all)
        addresses, key = workers.broadcast_object([links.addresses if links else [], key])
        seconds = _CONNECT_SECONDS * max(1, len(addresses))  # the workers need the time to try all addresses
        if links:
            expected = {str(one.rank): one for one in members[1:]}
            found = links.await_names(expected, seconds)
            connections = {connection: expected[name] for name, connection in found.items()}
        else:
            with suppress(ConnectionError):
                places = [(str(host), int(port)) for host, port in addresses]
                connection = connect(places, key, str(workers.rank), seconds - 1, silence_seconds)
                connections = {connection: members[0]}
    connected = workers.broadcast_object([member.rank for member in connections.values()])
    return connections, [member for member in members[1:] if member.rank not in connected]


class WorkerState(NamedTuple):
    """What a worker reports about itself."""

    name: str  # what its training thread does, as text that follows "rank 1 is"
    number: int = 0  # how often that changed before
    step: int = 0  # the training step that it belongs to; 0 if none
    place: int = 0  # where in the training it is; see ``Activity.place``
    is_long: bool = False  # whether it was announced to take long
    age_seconds: float = 0.0  # how long it has lasted
    user_code: str = ""  # where in the user's code it is; empty if it is not there, or not for long

    def __str__(self) -> str:
        """Return what the worker does, with the place in the user's code."""
        return f"{self.name} ({self.user_code})" if self.user_code else self.name


def state_of(mark: ActivityMark) -> WorkerState:
    """Return what this worker reports about itself now."""
    activity: Activity = mark.current
    age_seconds = time.monotonic() - activity.since_seconds
    user_code = mark.user_code() if age_seconds > _LOOK_AFTER_SECONDS else ""
    return WorkerState(
        f"{activity}{mark.part}",
        activity.number,
        activity.step,
        activity.place,
        activity.is_long,
        round(age_seconds, 3),
        user_code,
    )


def read_state(values: Any) -> WorkerState | None:
    """Return the state that a message holds; None if it holds none."""
    kinds = (str, int, int, int, bool, float | int, str)
    if not isinstance(values, list) or len(values) != len(kinds):
        return None
    if not all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True)):
        return None
    return WorkerState(*values)


class Peer(LineConnection):
    """The other end of a connection."""

    def __init__(self, connection: socket.socket, member: Member) -> None:
        super().__init__(connection, _MAX_LINE_BYTES)
        self.member = member

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived. It does not wait; what is no message is dropped."""
        found = []
        for line in self.receive_lines():
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line))
        return [message for message in found if isinstance(message, dict)]

    def send(self, message: dict[str, Any], must_arrive: bool = False) -> None:
        """Send a message without waiting; if the last one is still on its way, this one may be dropped."""
        self.send_bytes(json.dumps(message).encode() + b"\n", may_drop=not must_arrive)


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
        members = {rank: heard.member for rank, heard in self._heard.items()}
        if self._own and own:
            states[self._own.rank], members[self._own.rank] = own, self._own
        blamed = blame(states)
        is_long = any(states[rank].is_long for rank in blamed or states)
        limit = max(LONG_FACTOR * self._stall_timeout, LONG_SECONDS) if is_long else self._stall_timeout
        if waited_seconds < limit:
            return None
        ranks = sorted(blamed or states)
        doing = ", ".join(f"{members[rank]} is {states[rank]}" for rank in ranks[:_NAMED]) + _more(ranks)
        who = "the others have waited" if blamed else "no worker has made progress"
        return Stalled(f"{who} for {waited_seconds:.0f} s: {doing}", tuple(blamed))


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
