"""The connections that are watched: when the kernel ends them, and what cannot be reached."""

import socket
import time
from collections.abc import Callable

import pytest

from hvdtrain.elastic.links import connect, end_if_silent
from hvdtrain.elastic.watch.liveness import Member, describe_host

ONE = Member(1, "h2", "m")


def test_the_kernel_ends_a_silent_connection_within_the_time():
    one, other = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with one, other:
        end_if_silent(other, 20)
        read: Callable[[int], int] = lambda name: other.getsockopt(socket.IPPROTO_TCP, name)  # noqa: E731
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        total = read(socket.TCP_KEEPIDLE) + read(socket.TCP_KEEPINTVL) * read(socket.TCP_KEEPCNT)
        assert total == 20
        assert read(socket.TCP_USER_TIMEOUT) == 20_000  # while heartbeats are on their way


def test_a_host_is_named_with_its_ranks_and_one_of_the_same_name_is_another():
    members = [Member(0, "h1", "m"), ONE, Member(2, "h2", "other"), Member(3, "h2", "m")]
    assert describe_host(3, members) == "host h2 (ranks 1, 3)"
    assert describe_host(2, members) == "host h2 (rank 2)"


def test_addresses_that_refuse_or_do_not_answer_are_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        silent_address, refusing = silent.getsockname(), gone.getsockname()
        gone.close()
        start = time.monotonic()
        with pytest.raises(ConnectionError) as failed:
            connect([silent_address, refusing], "key", "1", 0.4, 0)
        assert time.monotonic() - start < 20
    assert all(f"127.0.0.1:{port}: " in str(failed.value) for _, port in (silent_address, refusing))
