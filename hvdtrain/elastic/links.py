"""Connections between the processes of a job: the proof of a key, lines both ways, and listening.

The driver of an elastic job listens, with the job's key, and so does rank 0 of other jobs for their watch.
Three lines of JSON: the driver sends a nonce, the worker its name, a nonce and a proof, and the driver a
proof. A proof covers the role, both nonces and the worker's name, so that none can be sent again or sent
back. The key itself never travels. Then both sides send messages. Only ``Links`` and ``connect`` wait.
"""

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import Any, cast

from hvdtrain.elastic.messages import MAX_LINE_BYTES, FromDriver, encode

_HANDSHAKE_BYTES = 1024  # of a line

_NONCE_BYTES = 16
_SECONDS = 5.0  # for an address, and for a line
_RETRY_SECONDS = 0.2
_PROBES = 3
_MAX_NAME = 64


class DriverHandshake:
    """The driver's side of one connection, without the connection."""

    def __init__(self, job_key: str) -> None:
        self._key = _derived(job_key)
        self._nonce = secrets.token_hex(_NONCE_BYTES)
        self.opening = _line({"nonce": self._nonce})  # the line that the driver sends first

    def answer(self, line: bytes) -> tuple[str, bytes] | None:
        """Return the worker's name and the driver's last line; None if the other end has not the key."""
        message = _fields(line, ("worker", "nonce", "proof"))
        if message is None or len(message["worker"]) > _MAX_NAME:
            return None
        worker, nonces = message["worker"], (self._nonce, message["nonce"])
        if not hmac.compare_digest(message["proof"].encode(), _proof(self._key, "worker", nonces, worker)):
            return None
        return worker, _line({"proof": _proof(self._key, "driver", nonces, worker).decode()})


def prove_to_driver(connection: socket.socket, job_key: str, worker: str, seconds: float = _SECONDS) -> None:
    """Carry out the worker's side of the handshake on a new connection, and check the driver's proof."""
    connection.settimeout(seconds)
    key = _derived(job_key)
    opening = _fields(receive_line(connection), ("nonce",))
    if opening is None:
        raise ConnectionError("what answers is not the driver of an elastic job")
    nonces = (opening["nonce"], secrets.token_hex(_NONCE_BYTES))
    proof = _proof(key, "worker", nonces, worker).decode()
    connection.sendall(_line({"worker": worker, "nonce": nonces[1], "proof": proof}))
    answer = _fields(receive_line(connection), ("proof",))
    expected = _proof(key, "driver", nonces, worker)
    if answer is None or not hmac.compare_digest(answer["proof"].encode(), expected):
        raise ConnectionError("what answers does not know this job's key")
    connection.settimeout(None)


def connect(
    addresses: Sequence[tuple[str, int]], key: str, name: str, seconds: float, silence_seconds: int
) -> socket.socket:
    """Connect to the first of several addresses at which somebody knows a key.

    A connection that was closed may have been crowded out by others, so all are tried until the time is over.
    After ``silence_seconds`` without a response of the other host, the kernel ends the connection.
    """
    reasons: dict[str, str] = {}
    until = time.monotonic() + seconds
    while addresses:
        for address in addresses:
            left = max(_RETRY_SECONDS, min(_SECONDS, until - time.monotonic()))
            try:
                connection = socket.create_connection(address, left)
                try:
                    prove_to_driver(connection, key, name, left)
                except BaseException:
                    connection.close()
                    raise
            except OSError as error:
                reasons[f"{address[0]}:{address[1]}"] = error.strerror or str(error)
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if silence_seconds:
                end_if_silent(connection, silence_seconds)
            # a process that is forked must not keep it open: its end says that this process ended
            os.register_at_fork(after_in_child=connection.close)
            return connection
        if time.monotonic() > until:
            break
        time.sleep(_RETRY_SECONDS)
    raise ConnectionError("; ".join(f"{address}: {reason}" for address, reason in reasons.items()))


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


def receive_line(connection: socket.socket) -> bytes:
    """Return the next line without its end; what follows it stays unread."""
    line = bytearray()
    while len(line) <= _HANDSHAKE_BYTES:
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("the connection was closed")
        if byte == b"\n":
            return bytes(line)
        line += byte
    raise ConnectionError("what arrives is no line of a handshake")


def _derived(job_key: str) -> bytes:
    return hmac.new(job_key.encode(), b"elastic", sha256).digest()


def _proof(key: bytes, role: str, nonces: tuple[str, str], worker: str) -> bytes:
    text = json.dumps([role, *nonces, worker])
    return hmac.new(key, text.encode(), sha256).hexdigest().encode()


def _line(message: dict[str, str]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _fields(line: bytes, names: tuple[str, ...]) -> dict[str, str] | None:
    """Return the fields of a line, all of them ASCII texts; None if it has others."""
    try:
        message: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or sorted(message) != sorted(names):
        return None
    return message if all(isinstance(value, str) and value.isascii() for value in message.values()) else None


HANDSHAKE_SECONDS = 5.0  # for a connection to prove that it knows the key, and to say hello
_PIECE_BYTES = 1 << 16
_MAX_STRANGERS = 512  # connections without a proof at a time; one more closes the oldest
_RESEND_SECONDS = 0.05
_MAX_OUTGOING_BYTES = 1 << 24  # what a worker that reads nothing may leave unread


class LineConnection:
    """A connection over which lines go both ways."""

    ends_with_long_line = False  # whether a line that is too long ends it; else that line is dropped

    def __init__(self, connection: socket.socket, max_bytes: int) -> None:
        self.connection, self.max_bytes = connection, max_bytes  # of a line that is taken
        self.is_closed = False  # whether the connection has ended
        self.error: OSError | None = None  # why it failed, if it did not end in order
        self._incoming, self._outgoing = bytearray(), bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the connection takes it."""
        return bool(self._outgoing)

    @property
    def is_unreachable(self) -> bool:
        """Whether the connection ended because its host no longer responds."""
        return self.error is not None and not isinstance(self.error, ConnectionResetError | BrokenPipeError)

    def receive_lines(self) -> list[bytes]:
        """Return the lines that have arrived, without their ends. If a line is very long, the rest waits."""
        try:
            while piece := self.connection.recv(min(_PIECE_BYTES, self.max_bytes), socket.MSG_DONTWAIT):
                self._incoming += piece
                if len(self._incoming) > self.max_bytes:
                    break
            else:
                self.is_closed = True
        except BlockingIOError:
            pass
        except OSError as error:
            self.is_closed, self.error = True, error
        *lines, rest = bytes(self._incoming).split(b"\n")
        if len(rest) > self.max_bytes:
            rest = b""
            self.is_closed = self.is_closed or self.ends_with_long_line
        self._incoming = bytearray(rest)
        return lines

    def send_bytes(self, line: bytes, *, may_drop: bool = False) -> None:
        """Send a line without waiting, unless very much is unread at the other end."""
        if len(self._outgoing) <= (0 if may_drop else _MAX_OUTGOING_BYTES):
            self._outgoing += line
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes now. If it has failed, the next receive says what is wrong."""
        try:
            while self._outgoing:
                sent = self.connection.send(self._outgoing, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()


class Link(LineConnection):
    """The connection to one worker, or to somebody who has not proved to be one."""

    ends_with_long_line = True  # a worker sends none

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        super().__init__(connection, _HANDSHAKE_BYTES)
        self.deadline = deadline
        self.worker = ""  # its name; empty until it has said hello and is known
        self.claimed = ""  # the name that it proved
        self.is_proven = False  # whether the other end knows the key
        self.handshake: DriverHandshake | None = None  # until it is over

    def send(self, message: FromDriver, *, may_drop: bool = False) -> None:
        """Send a message, as ``send_bytes`` does."""
        self.send_bytes(encode(message), may_drop=may_drop)


class Links:
    """All connections of a driver."""

    def __init__(
        self, addresses: Sequence[str], job_key: str, silence_seconds: float, expected: int = 0
    ) -> None:
        self._expected, self._key, self._silence_seconds = expected, job_key, silence_seconds
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._links: dict[socket.socket, Link] = {}
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        for address in addresses:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                listener.bind((address, 0))
                listener.listen(1024)
            except OSError:
                listener.close()
                continue
            listener.setblocking(False)
            self._listeners.append(listener)
            self._selector.register(listener, selectors.EVENT_READ)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def wake(self) -> None:
        """Let ``wait`` return. Any thread, and a signal handler, may call it."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def wait(self, seconds: float) -> list[tuple[Link, bytes]]:
        """Wait until something arrives, and return lines of those who have proved that they know the key."""
        received: list[tuple[Link, bytes]] = []
        if any(link.has_unsent for link in self._links.values()):
            seconds = min(seconds, _RESEND_SECONDS)
        for key, _ in self._selector.select(max(0.0, seconds)):
            ready = cast(socket.socket, key.fileobj)
            if ready is self._woken:
                with contextlib.suppress(OSError):
                    self._woken.recv(4096)
            elif ready in self._listeners:
                self._accept(ready)
            elif link := self._links.get(ready):
                received += [(link, line) for line in link.receive_lines() if self._is_message(link, line)]
        now = time.monotonic()
        for link in list(self._links.values()):
            link.flush()
            if not link.worker and now >= link.deadline:
                link.is_closed = True
        return received

    def await_names(self, names: Collection[str], seconds: float) -> dict[str, socket.socket]:
        """Return a blocking connection for each of these names that is proved in time; others are closed."""
        found: dict[str, socket.socket] = {}
        until = time.monotonic() + seconds
        while len(found) < len(names) and (left := until - time.monotonic()) > 0:
            self.wait(left)
            for link in [one for one in self._links.values() if one.is_proven]:
                if link.claimed in names and link.claimed not in found:
                    found[link.claimed] = link.connection
                    self._selector.unregister(link.connection)
                    del self._links[link.connection]
                    link.connection.setblocking(True)
                else:
                    self.close(link)
            self.closed()
        return found

    def closed(self) -> list[Link]:
        """Return the connections that have ended; they are forgotten."""
        ended = [link for link in self._links.values() if link.is_closed]
        for link in ended:
            self.close(link)
        return ended

    def close(self, link: Link) -> None:
        """End a connection and forget it."""
        if self._links.pop(link.connection, None) is not None:
            self._selector.unregister(link.connection)
            link.connection.close()

    def close_all(self) -> None:
        """End all connections, and do not listen any more."""
        for link in list(self._links.values()):
            self.close(link)
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _accept(self, listener: socket.socket) -> None:
        most = max(_MAX_STRANGERS, 2 * self._expected)
        for _ in range(most):
            try:
                connection, _address = listener.accept()
            except OSError as error:  # none waits any more, or it went away before it was accepted
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    print("elastic driver: too many open files; raise the limit: ulimit -n", file=sys.stderr)
                    time.sleep(1)  # the connection still waits
                return
            strangers = [link for link in self._links.values() if not link.worker]
            if len(strangers) >= most:
                self.close(strangers[0])
            connection.setblocking(False)
            link = Link(connection, time.monotonic() + HANDSHAKE_SECONDS)
            link.handshake = DriverHandshake(self._key)
            self._links[connection] = link
            self._selector.register(connection, selectors.EVENT_READ)
            link.send_bytes(link.handshake.opening)

    def _is_message(self, link: Link, line: bytes) -> bool:
        """Return whether a line is a message of somebody who knows the key, and not of the handshake."""
        if link.is_proven:
            return True
        answer = link.handshake.answer(line) if link.handshake else None
        link.handshake = None
        if answer is None:
            link.is_closed = True
            return False
        name, last = answer
        link.claimed, link.is_proven, link.max_bytes = name, True, MAX_LINE_BYTES
        link.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._silence_seconds:
            end_if_silent(link.connection, max(1, round(self._silence_seconds)))
        link.send_bytes(last)
        return False
