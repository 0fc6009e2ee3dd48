"""Connections with the token are accepted in time, whatever strangers do at the same port."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hvdtrain.elastic.watch import connections as worker_connections
from hvdtrain.elastic.watch.connections import accept_with_token, greeting

TOKEN = b"t" * 32


class Accepting:
    """`accept_with_token` in a thread, which expects ranks 1 and 2."""

    def __init__(self, seconds: float = 60) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = self.listener.getsockname()
        self.found: dict[socket.socket, str] = {}
        self._thread = threading.Thread(target=self._accept, args=(seconds,))
        self._thread.start()

    def _accept(self, seconds: float) -> None:
        self.found = accept_with_token([self.listener], TOKEN, {1: "one", 2: "two"}, seconds)

    def names(self) -> list[str]:
        """Wait for the end, and return the values of the accepted connections."""
        self._thread.join(90)
        assert not self._thread.is_alive()
        return sorted(self.found.values())

    def connect(self, rank: int, token: bytes = TOKEN, seconds: float = 60) -> socket.socket | None:
        """Connect as the workers do."""
        return worker_connections._connect_to_rank_0([self.address], token, rank, seconds)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Gives connections as long as a busy machine needs to send their token."""
    monkeypatch.setattr(worker_connections, "_TOKEN_SECONDS", 60)


@pytest.fixture
def server() -> Iterator[Accepting]:
    accepting = Accepting()
    yield accepting
    accepting.listener.close()
    for connection in accepting.found:
        connection.close()


def test_only_connections_with_the_token_are_accepted(server):
    assert server.connect(1, b"x" * 32, seconds=0.3) is None
    with server.connect(1), server.connect(2):
        assert server.names() == ["one", "two"]


def test_an_accepted_connection_is_blocking_and_has_lost_no_byte(server):
    with socket.create_connection(server.address) as first:
        first.sendall(greeting(TOKEN, 1) + b"more")
        with server.connect(2):
            assert server.names() == ["one", "two"]
            accepted = next(one for one, name in server.found.items() if name == "one")
            assert accepted.getblocking()
            assert accepted.recv(10) == b"more"


def test_a_rank_that_is_not_expected_and_a_second_one_are_refused(server):
    assert server.connect(3, seconds=0.3) is None
    with server.connect(1):
        assert server.connect(1, seconds=0.3) is None
        with server.connect(2):
            assert server.names() == ["one", "two"]


def test_strangers_that_send_slowly_nothing_or_garbage_delay_nobody(server):
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(server.address)) for _ in range(8)]
        for byte in greeting(TOKEN, 1)[:3]:
            strangers[0].sendall(bytes([byte]))
        strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        start = time.monotonic()
        with server.connect(1), server.connect(2):
            assert server.names() == ["one", "two"]
        assert time.monotonic() - start < 30  # a stranger has 60


def test_a_job_of_many_workers_takes_all_that_connect_at_once():
    """No worker is taken for a stranger because others have not sent their token yet."""
    ranks = range(1, 301)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        workers = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in ranks]
        found: list[dict] = []
        expected = {rank: rank for rank in ranks}
        thread = threading.Thread(
            target=lambda: found.append(accept_with_token([listener], TOKEN, expected, 60))
        )
        thread.start()
        time.sleep(0.3)  # all are accepted, none has sent anything
        for rank, worker in zip(ranks, workers, strict=True):
            worker.sendall(greeting(TOKEN, rank))
        thread.join(90)
        for connection in found[0]:
            stack.enter_context(connection)
        assert sorted(found[0].values()) == list(ranks)
