"""Connections between the processes of a job: lines that go both ways, and listening for who knows the key.

Nothing here waits for anybody but ``Links.wait``, which has a limit.
"""

import contextlib
import errno
import selectors
import socket
import sys
import time
from collections.abc import Collection, Sequence
from typing import cast

from hvdtrain.elastic.handshake import MAX_LINE_BYTES as MAX_HANDSHAKE_BYTES
from hvdtrain.elastic.handshake import DriverHandshake, end_if_silent
from hvdtrain.elastic.messages import MAX_LINE_BYTES, FromDriver, encode

HANDSHAKE_SECONDS = 5.0  # for a connection to prove that it knows the key, and to say hello
_PIECE_BYTES = 1 << 16
_MAX_STRANGERS = 512  # connections without a proof at a time; one more closes the oldest
_RESEND_SECONDS = 0.05
_MAX_OUTGOING_BYTES = 1 << 24  # what a worker that reads nothing may leave unread


class LineConnection:
    """A connection over which lines go both ways."""

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
            self.on_long_line()
        self._incoming = bytearray(rest)
        return lines

    def on_long_line(self) -> None:
        """Take note that a line was dropped because it is too long."""

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

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        super().__init__(connection, MAX_HANDSHAKE_BYTES)
        self.deadline = deadline
        self.worker = ""  # its name; empty until it has said hello and is known
        self.claimed = ""  # the name that it proved
        self.is_proven = False  # whether the other end knows the key
        self.handshake: DriverHandshake | None = None  # until it is over

    def on_long_line(self) -> None:
        """End the connection: a worker sends no such line."""
        self.is_closed = True

    def send(self, message: FromDriver, *, may_drop: bool = False) -> None:
        """Send a message, as ``send_bytes`` does."""
        self.send_bytes(encode(message), may_drop=may_drop)


class Links:
    """All connections of a driver."""

    def __init__(
        self,
        addresses: Sequence[str],
        job_key: str,
        silence_seconds: float,
        expected: int = 0,
    ) -> None:
        self._expected = expected
        self._key, self._silence_seconds = job_key, silence_seconds
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
