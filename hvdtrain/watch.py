"""Watching the hosts of a job: one that goes away without a word must not leave the others waiting.

A process that ends closes its connections, and the others' collectives fail at once. A host that
loses its power or its network closes nothing: Gloo waits for it, and MPI waits for ever. So one worker
of every host keeps a connection to rank 0 on which nothing is ever sent. The kernels see to it that
the other side still answers (TCP's keepalive), whatever the processes do; a busy or a stopped worker
raises no alarm, and a training step costs nothing.
"""

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.addresses import Addresses, own_addresses, reachable_by_others
from hvdtrain.backends.base import Workers
from hvdtrain.errors import PeerLostError

_VARIABLE = "HVDTRAIN_HOST_SILENCE_SECONDS"
_SILENCE_SECONDS = 20
_PROBES = 3
_CONNECT_SECONDS = 5.0
_ADDRESSES = 3  # of rank 0, that are tried one after the other
_TOKEN_BYTES = 32
_NAME_BYTES = 4

# called with what happened, by the watching thread
Lost = Callable[[PeerLostError], None]


class Watching:
    """What the watch and the job tell each other.

    Attributes:
        note: which hosts cannot be watched, in words; mostly empty.
        last_words: called with what happened before the process ends, to write it down.
    """

    def __init__(self) -> None:
        self.note = ""
        self.last_words: Callable[[str], None] = lambda problem: None


@dataclass(frozen=True)
class Place:
    """One host of the job, as its first worker knows it.

    Attributes:
        host: its name.
        rank: its first worker.
        ranks: all of its workers.
    """

    host: str
    rank: int
    ranks: tuple[int, ...]

    def in_words(self) -> str:
        """Give host and ranks, such as "host h2 (ranks 2, 3)"."""
        word = "rank" if len(self.ranks) == 1 else "ranks"
        return f"host {self.host} ({word} {', '.join(map(str, self.ranks))})"


def silence_seconds(environ: Mapping[str, str] = os.environ) -> int:
    """Give after how many seconds of silence a host counts as gone; 0: hosts are not watched."""
    value = environ.get(_VARIABLE, "")
    return int(value) if value.isdecimal() else _SILENCE_SECONDS


def watch_hosts(workers: Workers, lost: Lost) -> tuple["HostWatch", str]:
    """Collective. Call ``lost``, in a thread, when a host of the job is gone.

    Args:
        workers: the workers.
        lost: called once with what happened, on one worker of every host that is still there.

    Returns:
        The watch, and which hosts cannot be watched, in words; mostly nothing.
    """
    places = _places(workers)
    seconds = workers.broadcast_object(silence_seconds()) if len(places) > 1 else 0
    if not seconds:
        return HostWatch({}, workers.rank, seconds, lost), ""
    connections, unwatched = _connect(workers, places, seconds)
    return HostWatch(connections, workers.rank, seconds, lost), _unwatched_in_words(unwatched, places[0])


def _places(workers: Workers) -> list[Place]:
    """Collective. Give the hosts, that of rank 0 first; two machines may have one name."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        machine = ""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, key in enumerate(workers.allgather_object((workers.host, machine))):
        ranks.setdefault(key, []).append(rank)
    return [Place(host, own[0], tuple(own)) for (host, _), own in ranks.items()]


def _connect(
    workers: Workers, places: list[Place], seconds: int
) -> tuple[dict[socket.socket, Place], list[Place]]:
    """Collective. Connect one worker of every host with rank 0.

    Rank 0 listens only for this moment, on the job's network, to those that show a token that went
    through the workers' own collective.

    Returns:
        This worker's connections with who is at the other end, and the hosts that have none.
    """
    everyone = workers.allgather_object(own_addresses())
    token = secrets.token_bytes(_TOKEN_BYTES)
    own = next((place for place in places if place.rank == workers.rank), None)
    connections: dict[socket.socket, Place] = {}
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        if workers.rank == 0:
            listeners = _listen(stack, everyone[0], [everyone[place.rank] for place in places[1:]])
        offered = [listener.getsockname() for listener in listeners]
        offered, token = workers.broadcast_object((offered, token))
        if workers.rank == 0:
            connections = _accept(listeners, token, {place.rank: place for place in places[1:]})
        elif own is not None and (connection := _call(offered, token, workers.rank)) is not None:
            connections = {connection: places[0]}
    for connection in connections:
        _keep_alive(connection, seconds)
    connected = workers.broadcast_object({place.rank for place in connections.values()})
    return connections, [place for place in places[1:] if place.rank not in connected]


def _listen(stack: contextlib.ExitStack, own: Addresses, others: list[Addresses]) -> list[socket.socket]:
    """Listen on this host's addresses in networks that the other hosts are in; never on all."""
    listeners = []
    for address in reachable_by_others(own, others)[:_ADDRESSES]:
        listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        try:
            listener.bind((address, 0))
            listener.listen(128)
        except OSError:
            continue
        listeners.append(listener)
    return listeners


def _accept(
    listeners: list[socket.socket], token: bytes, expected: dict[int, Place]
) -> dict[socket.socket, Place]:
    """Take the connections of the expected workers, as long as they may take to try."""
    connections: dict[socket.socket, Place] = {}
    deadline = time.monotonic() + _CONNECT_SECONDS * max(1, len(listeners))
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        while len(connections) < len(expected) and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                place = _admitted(connection, token, expected)
                if place is None or place in connections.values():
                    connection.close()
                else:
                    connections[connection] = place
    return connections


def _admitted(connection: socket.socket, token: bytes, expected: dict[int, Place]) -> Place | None:
    """Give who is at the other end, or None where it does not show the token."""
    try:
        connection.settimeout(1)
        shown = _read(connection, _TOKEN_BYTES + _NAME_BYTES)
        if not hmac.compare_digest(shown[:_TOKEN_BYTES], token):
            return None
        connection.sendall(b"+")
    except OSError:
        return None
    return expected.get(int.from_bytes(shown[_TOKEN_BYTES:], "big"))


def _call(offered: list[tuple[str, int]], token: bytes, rank: int) -> socket.socket | None:
    """Connect to rank 0 by the first of its addresses that answers."""
    for address in offered:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection(address, _CONNECT_SECONDS - 1))
            connection.sendall(token + rank.to_bytes(_NAME_BYTES, "big"))
            _read(connection, 1)
            stack.pop_all()
            return connection
    return None


def _read(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes.

    Raises:
        OSError: where they do not come.
    """
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionAbortedError
        data += more
    return data


def _keep_alive(connection: socket.socket, seconds: int) -> None:
    """Let the kernel end a connection whose other side has been silent for so long."""
    interval = max(1, seconds // (_PROBES + 1))
    options = {
        "TCP_KEEPIDLE": max(1, seconds - _PROBES * interval),
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": _PROBES,
    }
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # macOS has other names
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class HostWatch:
    """The thread that waits until a connection fails.

    Args:
        connections: by whom they lead to.
        rank: this worker; rank 0 knows of every host and tells the others.
        seconds: of silence, after which the kernel ends a connection.
        lost: called when a host is gone.
    """

    def __init__(self, connections: dict[socket.socket, Place], rank: int, seconds: int, lost: Lost) -> None:
        self._connections, self._rank, self._seconds, self._lost = connections, rank, seconds, lost
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        if connections:
            self._thread = threading.Thread(target=self._wait, daemon=True, name="watch hosts")
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._wake.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for connection in (*self._connections, self._woken):
            connection.close()

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ)
            while len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        return
                    gone, first_hand = self._gone(key.fileobj)
                    if gone:
                        self._tell(gone, first_hand)
                        return
                    selector.unregister(key.fileobj)

    def _gone(self, connection: Any) -> tuple[str, bool]:
        """Give which host is gone, if one is, and whether this worker found out itself.

        Where a process at the other end ended, that is not told here: collectives notice it.
        """
        try:
            return connection.recv(4096).decode(errors="replace"), False
        except (ConnectionResetError, BrokenPipeError):
            return "", True
        except OSError:
            return self._connections[connection].in_words(), True

    def _tell(self, gone: str, first_hand: bool) -> None:
        if self._rank == 0:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.send(gone.encode(), socket.MSG_DONTWAIT)
        self._lost(
            PeerLostError(
                f"{gone} is gone: it has not answered for {self._seconds} s",
                "It lost its power or its network, or was too busy to answer at all. Look at it, then go on "
                f"from the newest checkpoint with --resume. {_VARIABLE} sets how long hosts may be silent.",
                everywhere=not first_hand,  # rank 0 says it
            )
        )


def _unwatched_in_words(unwatched: list[Place], root: Place) -> str:
    if not unwatched:
        return ""
    names = ", ".join(place.host for place in unwatched)
    return (
        f"cannot watch {names}: no connection to {root.host} beside Horovod's own; should one of them "
        "vanish, the job may wait for it for up to 10 minutes"
    )
