"""Short-lived listeners by which hosts find out whether they reach each other, and how fast.

A listener is bound to one address of its host, at a port that the system chooses, and answers only who
knows the examination's token. It says what time it is, takes messages, and acknowledges each.
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

_CONNECT_SECONDS = 3.0
_TALK_SECONDS = 20.0
_TOKEN_BYTES = 32
_CHUNK_BYTES = 1 << 18
_LISTENERS = 4  # interfaces of a host that are tried
_ACKNOWLEDGEMENT = b"!"


class Listeners:
    """A host's listeners.

    Attributes:
        places: by interface: address, port, token; what others need to connect.
    """

    def __init__(self, interfaces: Mapping[str, list[str]]) -> None:
        self._token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.places: dict[str, list[Any]] = {}
        for name, addresses in list(interfaces.items())[:_LISTENERS]:
            address = addresses[0].partition("/")[0]
            with contextlib.suppress(OSError):  # an address that has just gone
                self._listen(name, address)

    def _listen(self, name: str, address: str) -> None:
        listener = socket.create_server((address, 0), backlog=64)
        listener.settimeout(0.2)
        self._sockets.append(listener)
        self.places[name] = [address, listener.getsockname()[1], self._token]
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
            threading.Thread(target=_answer, args=(connection, self._token), daemon=True).start()

    def close(self) -> None:
        """Close them; connections that are open end by themselves."""
        for listener in self._sockets:
            listener.close()
        for thread in self._threads:
            thread.join(1)


def _answer(connection: socket.socket, token: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_TALK_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        said = _receive(connection, _TOKEN_BYTES)
        if not hmac.compare_digest(said, token.encode()):
            return
        connection.sendall(struct.pack(">d", time.time()))
        while size := struct.unpack(">Q", _receive(connection, 8))[0]:
            _drain(connection, size)
            connection.sendall(_ACKNOWLEDGEMENT)


def connect(place: list[Any]) -> dict[str, Any]:
    """Try one listener of another host.

    Returns:
        ``error``: what is wrong, empty where it answered; then ``clock``: seconds that its clock is
        ahead of the own, and ``trip``: seconds of the round trip, which is that figure's uncertainty.
    """
    try:
        with _opened(place) as (_, clock, trip):
            return {"error": "", "clock": clock, "trip": trip}
    except TimeoutError:
        return {"error": "no answer"}
    except (OSError, struct.error) as error:
        return {"error": (getattr(error, "strerror", None) or str(error)).lower()}


@contextmanager
def conversation(place: list[Any]) -> Iterator["Conversation"]:
    """Context with a connection over which messages can be sent.

    Raises:
        OSError: where there is none, also while it is used.
    """
    with _opened(place) as (connection, _, _):
        yield Conversation(connection)
        connection.sendall(struct.pack(">Q", 0))


class Conversation:
    """A connection to a listener."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: memoryview) -> None:
        """Send a message, and wait for its acknowledgement."""
        self._connection.sendall(struct.pack(">Q", len(message)))
        self._connection.sendall(message)
        _receive(self._connection, 1)


@contextmanager
def _opened(place: list[Any]) -> Iterator[tuple[socket.socket, float, float]]:
    address, port, token = place
    with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = time.time()
        connection.sendall(token.encode())
        (its_time,) = struct.unpack(">d", _receive(connection, 8))
        received = time.time()
        connection.settimeout(_TALK_SECONDS)
        yield connection, its_time - (sent + received) / 2, received - sent


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def _drain(connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while size:
        read = connection.recv_into(buffer, min(size, len(buffer)))
        if not read:
            raise ConnectionError("the connection was closed")
        size -= read
