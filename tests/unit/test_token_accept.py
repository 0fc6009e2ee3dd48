"""Connections of workers: accepted in time whatever strangers do, and the lines that go over them."""

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdtrain.elastic import links
from hvdtrain.elastic.links import LineConnection, Links
from hvdtrain.elastic.watch.liveness import Member, describe_host

KEY = "k" * 64


class Accepting:
    """Links in a thread, which expect the workers 1 and 2, or others."""

    def __init__(self, names=("1", "2"), seconds: float = 60) -> None:
        self.links = Links(["127.0.0.1"], KEY, 20)
        (self.address,) = self.links.addresses
        self._found = ThreadPoolExecutor(1).submit(self.links.await_names, names, seconds)

    @property
    def found(self) -> dict[str, socket.socket]:
        """The connections of the workers, once they are there."""
        return self._found.result(90)

    def names(self) -> list[str]:
        return sorted(self.found)

    def connect(self, name: str, key: str = KEY, seconds: float = 60) -> socket.socket:
        """Connect as the workers do."""
        return links.connect([self.address], key, name, seconds, 0)

    def close(self) -> None:
        for connection in self.found.values():
            connection.close()
        self.links.close_all()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Gives connections as long as a busy machine needs for the links."""
    monkeypatch.setattr(links, "HANDSHAKE_SECONDS", 60)


@pytest.fixture
def server() -> Iterator[Accepting]:
    with contextlib.closing(Accepting()) as accepting:
        yield accepting


def test_only_connections_with_the_key_are_accepted(server):
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:"):
        server.connect("1", "x" * 64, seconds=0.3)
    with server.connect("1") as one, server.connect("2"):
        assert server.names() == ["1", "2"]
        assert server.found["1"].getblocking()
        one.sendall(b"more")
        assert server.found["1"].recv(10) == b"more"


def test_strangers_that_send_slowly_nothing_or_garbage_delay_nobody(server):
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(server.address)) for _ in range(8)]
        strangers[0].sendall(b'{"work')
        strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        start = time.monotonic()
        with server.connect("3"), server.connect("1"), server.connect("1"), server.connect("2"):
            assert server.names() == ["1", "2"]
        assert time.monotonic() - start < 30  # a stranger has 60


def test_workers_that_do_not_come_are_given_up_in_time():
    with contextlib.closing(Accepting(seconds=0.5)) as server, server.connect("2"):
        assert server.names() == ["2"]


def test_a_job_of_many_workers_takes_all_that_connect_at_once():
    """No worker is taken for a stranger because others have not proved the key yet."""
    names = [str(number) for number in range(300)]
    with contextlib.closing(Accepting(names)) as server, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(socket.create_connection(server.address)) for _ in names]
        for name, worker in zip(names, workers, strict=True):
            links.prove_to_driver(worker, KEY, name, 60)
        assert server.names() == sorted(names)


def test_the_kernel_ends_a_silent_connection_within_the_time():
    one, other = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with one, other:
        links.end_if_silent(other, 20)
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        idle, interval, count, in_flight = [other.getsockopt(socket.IPPROTO_TCP, name) for name in names]
        assert idle + interval * count == 20
        assert in_flight == 20_000  # while heartbeats are on their way


def test_a_host_is_named_with_its_ranks_and_one_of_the_same_name_is_another():
    members = [Member(0, "h1", "m"), Member(1, "h2", "m"), Member(2, "h2", "other"), Member(3, "h2", "m")]
    assert describe_host(3, members) == "host h2 (ranks 1, 3)"
    assert describe_host(2, members) == "host h2 (rank 2)"


def test_addresses_that_refuse_or_do_not_answer_are_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        silent_address, refusing = silent.getsockname(), gone.getsockname()
        gone.close()
        start = time.monotonic()
        with pytest.raises(ConnectionError) as failed:
            links.connect([silent_address, refusing], "key", "1", 0.4, 0)
        assert time.monotonic() - start < 20
    assert all(f"127.0.0.1:{port}: " in str(failed.value) for _, port in (silent_address, refusing))


@pytest.fixture
def ends():
    """Give a connection of lines, and the socket at its other end."""
    here, there = socket.socketpair()
    with here, there:
        yield LineConnection(here, 1000), there


def test_lines_arrive_whole(ends):
    lines, other = ends
    assert lines.receive_lines() == []
    other.sendall(b"one\ntw")
    assert lines.receive_lines() == [b"one"]
    other.sendall(b"o\n\n")
    assert lines.receive_lines() == [b"two", b""]
    assert not lines.is_closed
    other.close()
    assert lines.receive_lines() == []
    assert (lines.is_closed, lines.error) == (True, None)


def test_a_line_without_end_is_dropped_and_lines_behind_it_are_taken(ends):
    lines, other = ends
    other.sendall(b"x" * 1500)
    assert lines.receive_lines() == []
    other.sendall(b"rest\nnext\n")
    assert lines.receive_lines()[-1] == b"next"
    lines.ends_with_long_line = True
    other.sendall(b"x" * 1500)
    assert lines.receive_lines() == []
    assert lines.is_closed


def test_what_is_not_taken_now_is_sent_later(ends):
    lines, other = ends
    line = b"y" * (1 << 22) + b"\n"
    lines.send_bytes(line)
    assert lines.has_unsent
    received = bytearray()
    while len(received) < len(line):
        received += other.recv(1 << 20)
        lines.flush()
    assert (bytes(received), lines.has_unsent) == (line, False)


def test_a_connection_that_failed_is_named_by_the_next_receive(ends):
    lines, other = ends
    other.close()
    lines.send_bytes(b"lost\n")
    assert not lines.has_unsent
    lines.receive_lines()
    assert lines.is_closed
