"""A driver of an elastic job that a test scripts: it says what the test tells it to, over real sockets."""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from hvdtrain.elastic.links import DriverHandshake, receive_line
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.elastic.messages import FromDriver, FromWorker, Hello, Welcome, encode, from_worker
from hvdtrain.workers.world import MemberInfo, World

T = TypeVar("T")

KEY = "key of the job"
SECONDS = 60.0


def eventually(condition: Callable[[], object]) -> object:
    """Wait until something holds; return what it is then."""
    until = time.monotonic() + SECONDS
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def accept_worker(connection: socket.socket, job_key: str, seconds: float = 30.0) -> str:
    """Carry out the driver's side of the handshake on a blocking connection; return the worker's name."""
    connection.settimeout(seconds)
    handshake = DriverHandshake(job_key)
    connection.sendall(handshake.opening)
    answer = handshake.answer(receive_line(connection))
    if answer is None:
        raise ConnectionError("who connected does not know this job's key")
    worker, last = answer
    connection.sendall(last)
    connection.settimeout(None)
    return worker


def world(generation: int = 1, rank: int = 0, size: int = 2, **fields: object) -> World:
    """Return a world of workers on one host."""
    members = tuple(MemberInfo(worker=f"w{n}", rank=n, host="h1", pid=n + 1) for n in range(size))
    values = {"generation": generation, "rank": rank, "size": size, "local_rank": rank, "local_size": size}
    values |= {"cross_rank": 0, "cross_size": 1, "host": "h1", "members": members}
    values |= {"store": ("127.0.0.1", 4321), "one_host": True, "salt": "salt"}
    return World(**{**values, **fields})


def disconnect(membership: Membership) -> None:
    """End the connection of a worker, which is no error."""
    membership._thread.is_over = True
    membership._connection.close()
    membership._thread._thread.join(SECONDS)


class ScriptedDriver:
    """The driver's end of one worker's connection; use it as a context."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.environ = {
            "HVDTRAIN_ELASTIC": f"127.0.0.1:{self.listener.getsockname()[1]}",
            "HVDTRAIN_WORKER": "w7",
            "HVDTRAIN_SLOT": "1",
            "HOROVOD_RENDEZVOUS_KEY": KEY,
        }
        self.connection: socket.socket | None = None
        self.received: list[FromWorker] = []
        self._rest = b""

    def __enter__(self) -> "ScriptedDriver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.listener.close()

    def accept(self, *first: FromDriver, lease_seconds: float = 20.0, is_welcome: bool = True) -> None:
        """Take a worker's connection and hello; answer with a welcome, if it is, and other messages."""
        self.connection, _ = self.listener.accept()
        assert accept_worker(self.connection, KEY) == self.environ.get("HVDTRAIN_WORKER", "")
        self.expect(Hello)
        limits = {"least": 1, "most": 4, "lease_seconds": lease_seconds}
        welcome = Welcome(worker="w7", job="j1", slot=1, slots_on_host=2, is_training=True, **limits)
        self.say(*(is_welcome * (welcome,)), *first)

    def say(self, *messages: FromDriver) -> None:
        """Send messages."""
        self.connection.sendall(b"".join(map(encode, messages)))

    def expect(self, kind: type[T], seconds: float = SECONDS) -> T:
        """Return the next message of a kind; messages of other kinds before it are dropped."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            while self.received:
                if isinstance(message := self.received.pop(0), kind):
                    return message
            self._receive(until - time.monotonic())
        raise AssertionError(f"no {kind.__name__} arrived")

    def hears(self, kind: type[FromWorker], seconds: float) -> bool:
        """Return whether a message of a kind arrives in time."""
        with contextlib.suppress(AssertionError):
            self.expect(kind, seconds)
            return True
        return False

    def close(self) -> None:
        """End the connection."""
        if self.connection is not None:
            self.connection.close()

    def _receive(self, seconds: float) -> None:
        self.connection.settimeout(max(0.01, seconds))
        with contextlib.suppress(TimeoutError):
            *lines, self._rest = (self._rest + self.connection.recv(1 << 16)).split(b"\n")
            for line in lines:
                message = from_worker(line)
                assert message is not None, f"no message: {line!r}"
                self.received.append(message)
