"""Short-lived listeners, to test whether hosts can connect to each other, and how fast.

A listener is bound to one address of its host, at a port that the system chooses, and answers only clients
that send the listener's token. It sends its time of day, receives messages, and acknowledges each of them.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hvdtrain.host.network import receive_exactly

_CONNECT_SECONDS = 3.0
_SESSION_SECONDS = 20.0
_TOKEN_BYTES = 32
_CHUNK_BYTES = 1 << 18
_MAX_LISTENERS = 4  # interfaces of a host that are tried
_ACKNOWLEDGEMENT = b"!"


class Listeners:
    """The listeners of a host.

    Attributes:
        endpoints: for each interface, what other hosts need to connect: address, port, token.
    """

    def __init__(self, interfaces: Mapping[str, list[str]]) -> None:
        self._token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.endpoints: dict[str, list[Any]] = {}
        for name, addresses in list(interfaces.items())[:_MAX_LISTENERS]:
            address = addresses[0].partition("/")[0]
            with contextlib.suppress(OSError):  # the address has just been removed
                self._listen(name, address)

    def _listen(self, name: str, address: str) -> None:
        listener = socket.create_server((address, 0), backlog=64)
        listener.settimeout(0.2)
        self._sockets.append(listener)
        self.endpoints[name] = [address, listener.getsockname()[1], self._token]
        thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            threading.Thread(target=_serve, args=(connection, self._token), daemon=True).start()

    def close(self) -> None:
        """Close the listeners. Open connections end by themselves."""
        for listener in self._sockets:
            listener.close()
        for thread in self._threads:
            thread.join(1)


def _serve(connection: socket.socket, token: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_SESSION_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = receive_exactly(connection, _TOKEN_BYTES)
        if not hmac.compare_digest(received, token.encode()):
            return
        connection.sendall(struct.pack(">d", time.time()))
        while size := struct.unpack(">Q", receive_exactly(connection, 8))[0]:
            _drain(connection, size)
            connection.sendall(_ACKNOWLEDGEMENT)


def connect(endpoint: list[Any]) -> dict[str, Any]:
    """Connect to one listener of another host.

    Returns:
        ``error``: why it failed, empty if the listener answered. If it did, ``clock``: how many seconds
        its clock is ahead of this host's, and ``trip``: the seconds of the round trip, which are the
        uncertainty of ``clock``.
    """
    try:
        with _connected(endpoint) as (_, clock, trip):
            return {"error": "", "clock": clock, "trip": trip}
    except TimeoutError:
        return {"error": "no answer"}
    except (OSError, struct.error) as error:
        return {"error": (getattr(error, "strerror", None) or str(error)).lower()}


@contextmanager
def open_session(endpoint: list[Any]) -> Iterator["Session"]:
    """Context manager: a connection to a listener over which messages can be sent.

    Raises:
        OSError: If the connection cannot be made, or fails while it is used.
    """
    with _connected(endpoint) as (connection, _, _):
        yield Session(connection)
        connection.sendall(struct.pack(">Q", 0))


class Session:
    """An open connection to a listener."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: memoryview) -> None:
        """Send a message and wait for its acknowledgement."""
        self._connection.sendall(struct.pack(">Q", len(message)))
        self._connection.sendall(message)
        receive_exactly(self._connection, 1)


@contextmanager
def _connected(endpoint: list[Any]) -> Iterator[tuple[socket.socket, float, float]]:
    address, port, token = endpoint
    with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = time.time()
        connection.sendall(token.encode())
        (remote_time,) = struct.unpack(">d", receive_exactly(connection, 8))
        received = time.time()
        connection.settimeout(_SESSION_SECONDS)
        yield connection, remote_time - (sent + received) / 2, received - sent


def _drain(connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while size:
        read = connection.recv_into(buffer, min(size, len(buffer)))
        if not read:
            raise ConnectionError("the connection was closed")
        size -= read
