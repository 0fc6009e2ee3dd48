"""How two processes of a job prove to each other that they know a key: who listens, and a worker.

The driver of an elastic job listens, with the job's key, and so does rank 0 of other jobs for their watch.
Three lines of JSON: the driver sends a nonce, the worker its name, a nonce and a proof, and the driver a
proof. A proof covers the role, both nonces and the worker's name, so that none can be sent again or sent
back. The key itself never travels. Then both sides send messages.
"""

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

MAX_LINE_BYTES = 1024

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
    while len(line) <= MAX_LINE_BYTES:
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
