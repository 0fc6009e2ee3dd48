"""The watch of a job's workers: a connection from each to rank 0, and lines of JSON about once a second."""

import json
import os
import secrets
import socket
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hvdtrain.elastic.handshake import connect
from hvdtrain.elastic.links import LineConnection, Links
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
