"""A worker's connection to the driver of its elastic job."""

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Mapping

from hvdtrain.elastic.handshake import prove_to_driver
from hvdtrain.elastic.messages import MAX_LINE_BYTES, FromDriver, FromWorker, encode, from_driver
from hvdtrain.elastic.watch.connections import end_if_silent
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.launcher import ELASTIC_VARIABLE, WORKER_VARIABLE, host_name
from hvdtrain.host.signed_requests import KEY_VARIABLE
from hvdtrain.watch.lines import LineConnection
from hvdtrain.watch.watch_events import silence_seconds

CONNECT_SECONDS = 20.0  # for all addresses together; the driver listens before it starts a worker

_ADDRESS_SECONDS = 5.0
_RETRY_SECONDS = 0.2


class DriverConnection(LineConnection):
    """A connection over which messages go both ways. Only ``queue`` may be called by any thread.

    Args:
        connection: the connection, after the handshake.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, MAX_LINE_BYTES)
        self._queue: deque[bytes] = deque()

    @property
    def is_sending(self) -> bool:
        """Whether something is not sent yet."""
        return bool(self._queue or self.has_unsent) and not self.is_closed

    def queue(self, message: FromWorker) -> None:
        """Let a message be sent by the next ``send``."""
        self._queue.append(encode(message))

    def send(self) -> None:
        """Send what is queued, as far as that does not wait."""
        while self._queue:
            self._outgoing += self._queue.popleft()
        self.flush()

    def receive(self) -> list[FromDriver]:
        """Return the messages that have arrived. It does not wait; what is no message is dropped."""
        return [message for line in self.receive_lines() if (message := from_driver(line))]

    def close(self) -> None:
        """End the connection."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # a process that was forked may have it, too
        self.connection.close()


def open_connection(environ: Mapping[str, str], seconds: float = CONNECT_SECONDS) -> socket.socket:
    """Connect to the driver at the first of its addresses that answers as the job's driver.

    Args:
        environ: what the launcher gave this worker.
        seconds: how long to try.

    Raises:
        EnvironmentFault: If there is no driver that knows the job's key.
    """
    text, key = environ.get(ELASTIC_VARIABLE, ""), environ.get(KEY_VARIABLE, "")
    addresses = _addresses(text)
    if not addresses or not key:
        found = f"{ELASTIC_VARIABLE}={text!r}" if not addresses else f"{KEY_VARIABLE} is not set"
        raise EnvironmentFault(
            f"this process is a worker of an elastic job, and does not know its driver: {found}",
            "horovodrun --min-np and `python -m hvdtrain elastic`, which start elastic jobs, set both. "
            f"Unset {ELASTIC_VARIABLE} for a job that is not elastic.",
        )
    reasons: dict[str, str] = {}
    until = time.monotonic() + seconds
    while True:
        for address in addresses:
            left = max(_RETRY_SECONDS, min(_ADDRESS_SECONDS, until - time.monotonic()))
            try:
                return _connect(address, key, environ.get(WORKER_VARIABLE, ""), left)
            except OSError as error:
                reasons[f"{address[0]}:{address[1]}"] = error.strerror or str(error)
        if time.monotonic() > until:
            break
        time.sleep(_RETRY_SECONDS)
    tried = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
    raise EnvironmentFault(
        f"host {host_name(environ)} cannot connect to the driver of its elastic job ({tried})",
        "Hosts of a job must reach the host of the launcher on all ports; its --network-interfaces option "
        "chooses the network.",
    )


def _connect(address: tuple[str, int], key: str, worker: str, seconds: float) -> socket.socket:
    """Connect to one address and carry out the handshake.

    Raises:
        OSError: If nothing answers there, or not the driver of this job.
    """
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, seconds))
        prove_to_driver(connection, key, worker, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if silence := silence_seconds():
            end_if_silent(connection, silence)
        # a process that is forked must not keep it open: the driver learns from its end that this one ended
        os.register_at_fork(after_in_child=connection.close)
        stack.pop_all()
        return connection


def _addresses(text: str) -> list[tuple[str, int]]:
    """Return the addresses of the driver: host and port, as in "10.0.0.1:4000,10.1.0.1:4000"."""
    parts = [part.strip().rpartition(":") for part in text.split(",")]
    return [(host, int(port)) for host, _, port in parts if host and port.isdecimal()]
