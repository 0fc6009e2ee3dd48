"""Lines over a connection, received and sent without waiting."""

import socket

_PIECE_BYTES = 1 << 16


class LineConnection:
    """A connection over which lines go both ways.

    Args:
        connection: the socket.
        max_bytes: the longest line that is taken; a longer one is dropped.

    Attributes:
        connection: the socket.
        max_bytes: the longest line that is taken.
        is_closed: whether the connection has ended.
        error: why it failed, if it did not end in order.
    """

    def __init__(self, connection: socket.socket, max_bytes: int) -> None:
        self.connection, self.max_bytes = connection, max_bytes
        self.is_closed = False
        self.error: OSError | None = None
        self._incoming, self._outgoing = bytearray(), bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the connection takes it."""
        return bool(self._outgoing)

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

    def send_bytes(self, line: bytes) -> None:
        """Send a line behind those that are on their way."""
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
