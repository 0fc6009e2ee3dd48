"""Accepting the connections that send a token, among any number that do not."""

import contextlib
import hmac
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

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
