"""The connections over which the workers of a job are watched: one from each worker to rank 0."""

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import psutil

from hvdtrain.host.hostfile import Addresses, own_addresses, reachable_by_others, receive_exactly
from hvdtrain.workers.agreement import Workers

_TOKEN_SECONDS = 1.0  # for a connection to send its token and rank
# Connections without a token at a time: so many, and at least twice as many as there are workers, which
# connect all at once; one more closes the oldest.
_MAX_UNPROVEN = 256
_RANK_BYTES = 4

T = TypeVar("T")


@dataclass
class _Unproven:
    """A connection that has not sent the whole token yet."""

    deadline: float
    received: bytearray = field(default_factory=bytearray)


def greeting(token: bytes, rank: int) -> bytes:
    """Return what a worker sends on a new connection; the answer to it is one byte."""
    return token + rank.to_bytes(_RANK_BYTES, "big")


def accept_with_token(
    listeners: Sequence[socket.socket], token: bytes, expected: Mapping[int, T], seconds: float
) -> dict[socket.socket, T]:
    """Accept one connection of each expected rank; other connections delay nothing.

    No connection is waited for: whatever arrives is read when it is there. A connection has a second for
    its token, whether it sends nothing or one byte at a time.

    Args:
        listeners: listening sockets, which become non-blocking.
        token: what the connection must send first.
        expected: the value of each rank that may connect.
        seconds: after this time, the ranks that are missing are given up.

    Returns:
        The connections, blocking, each with the value of its rank. A second connection of a rank is closed.
    """
    deadline, limit = time.monotonic() + seconds, max(_MAX_UNPROVEN, 2 * len(expected))
    unproven: dict[socket.socket, _Unproven] = {}
    connections: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        stack.callback(_close_all, unproven)
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        while len(connections) < len(expected) and (now := time.monotonic()) < deadline:
            for connection in [one for one, state in unproven.items() if state.deadline <= now]:
                _close(connection, selector, unproven)
            ends = min([deadline, *(state.deadline for state in unproven.values())])
            for key, _ in selector.select(ends - now):
                ready = cast(socket.socket, key.fileobj)
                if ready in listeners:
                    _accept_waiting(ready, selector, unproven, limit)
                elif ready in unproven and (rank := _read_rank(ready, token, selector, unproven)) is not None:
                    if rank in expected and rank not in connections and _welcome(ready):
                        connections[rank] = ready
                    else:
                        ready.close()
    return {connection: expected[rank] for rank, connection in connections.items()}


def _close_all(connections: Mapping[socket.socket, _Unproven]) -> None:
    for connection in connections:
        connection.close()


def _accept_waiting(
    listener: socket.socket,
    selector: selectors.BaseSelector,
    unproven: dict[socket.socket, _Unproven],
    limit: int,
) -> None:
    """Accept what waits at a listener, without more open connections than the limit."""
    for _ in range(limit):
        try:
            connection, _address = listener.accept()
        except OSError:  # none waits any more, or it went away before it was accepted
            return
        if len(unproven) >= limit:
            _close(next(iter(unproven)), selector, unproven)
        connection.setblocking(False)
        unproven[connection] = _Unproven(time.monotonic() + _TOKEN_SECONDS)
        selector.register(connection, selectors.EVENT_READ)


def _read_rank(
    connection: socket.socket,
    token: bytes,
    selector: selectors.BaseSelector,
    unproven: dict[socket.socket, _Unproven],
) -> int | None:
    """Read from a connection. Return the rank if it is complete; close the connection if it is no worker."""
    received = unproven[connection].received
    try:
        piece = connection.recv(len(token) + _RANK_BYTES - len(received))
    except BlockingIOError:
        return None
    except OSError:
        piece = b""
    received += piece
    known = min(len(received), len(token))
    if not piece or not hmac.compare_digest(bytes(received[:known]), token[:known]):
        _close(connection, selector, unproven)
    elif len(received) == len(token) + _RANK_BYTES:
        selector.unregister(connection)
        del unproven[connection]
        return int.from_bytes(received[len(token) :], "big")
    return None


def _welcome(connection: socket.socket) -> bool:
    """Confirm the token, and return whether the connection still exists."""
    try:
        connection.sendall(b"+")
        connection.setblocking(True)
    except OSError:
        return False
    return True


def _close(
    connection: socket.socket, selector: selectors.BaseSelector, unproven: dict[socket.socket, _Unproven]
) -> None:
    selector.unregister(connection)
    del unproven[connection]
    connection.close()


_PROBES = 3
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_MAX_ADDRESSES = 3  # addresses of rank 0 to try, one after the other
_TOKEN_BYTES = 32
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
    with contextlib.suppress(OSError):
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
    """Collective. Connect every worker to rank 0.

    Rank 0 listens only during this call, on the job's network, and accepts only connections that send a
    token, which the workers receive by a collective.

    Args:
        workers: the workers.
        members: all of them.
        silence_seconds: after this time without a response of the other host, the kernel ends a connection;
            0 for never.

    Returns:
        This worker's connections, each with the worker at the other end, and the workers without one.
    """
    everyone = workers.allgather_object(own_addresses())
    connections: dict[socket.socket, Member] = {}
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        if workers.rank == 0:
            is_one_host = all(member.shares_host(members[0]) for member in members)
            listeners = _listen(stack, {} if is_one_host else everyone[0], everyone[1:])
        addresses = [list(listener.getsockname()) for listener in listeners]
        token = secrets.token_bytes(_TOKEN_BYTES).hex()
        addresses, token = workers.broadcast_object([addresses, token])
        if workers.rank == 0:
            expected = {one.rank: one for one in members[1:]}
            # the workers need the time to try all addresses
            seconds = _CONNECT_SECONDS * max(1, len(listeners))
            connections = accept_with_token(listeners, bytes.fromhex(token), expected, seconds)
        else:
            connection = _connect_to_rank_0(addresses, bytes.fromhex(token), workers.rank)
            connections = {} if connection is None else {connection: members[0]}
    for connection in connections:
        connection.settimeout(None)
        if silence_seconds:
            end_if_silent(connection, silence_seconds)
    connected = workers.broadcast_object([member.rank for member in connections.values()])
    return connections, [member for member in members[1:] if member.rank not in connected]


def _listen(stack: contextlib.ExitStack, own: Addresses, others: list[Addresses]) -> list[socket.socket]:
    """Listen on this host's addresses in networks that the other hosts share, never on all addresses.

    If all workers run on one host, listen on the loopback interface only.
    """
    listeners = []
    for address in reachable_by_others(own, others)[:_MAX_ADDRESSES] if own else [_LOOPBACK]:
        listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        try:
            listener.bind((address, 0))
            listener.listen(1024)
        except OSError:
            continue
        listeners.append(listener)
    return listeners


def _connect_to_rank_0(
    addresses: list[list[object]], token: bytes, rank: int, seconds: float = _CONNECT_SECONDS - 1
) -> socket.socket | None:
    """Connect to rank 0 at the first of its addresses that responds; None if none does.

    A connection that was closed may have been crowded out by others, so all are tried until the time is over.

    Args:
        addresses: rank 0's, each a host and a port.
        token: what to send.
        rank: this worker's.
        seconds: the time for each address; as long as rank 0 listens, or less.
    """
    until = time.monotonic() + seconds * len(addresses)
    is_first = True
    while addresses and (is_first or time.monotonic() < until):
        for host, port in addresses:
            left = seconds if is_first else min(seconds, max(_RETRY_SECONDS, until - time.monotonic()))
            if connection := _connect((str(host), int(str(port))), token, rank, left):
                return connection
        is_first = False
        time.sleep(_RETRY_SECONDS)
    return None


def _connect(address: tuple[str, int], token: bytes, rank: int, seconds: float) -> socket.socket | None:
    """Connect to an address of rank 0; None if it does not take the connection."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, seconds))
        connection.sendall(greeting(token, rank))
        receive_exactly(connection, 1)
        stack.pop_all()
        return connection
    return None


def end_if_silent(connection: socket.socket, seconds: int) -> None:
    """Let the kernel end a connection after this number of seconds without a response of the other host."""
    interval = max(1, seconds // (_PROBES + 1))
    options = {
        "TCP_KEEPIDLE": max(1, seconds - _PROBES * interval),
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": seconds * 1000,  # while data is on its way, keepalive does nothing
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # macOS has other names
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
