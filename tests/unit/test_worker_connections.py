"""The connections that are watched: when the kernel ends them, and the token."""

import contextlib
import socket
from collections.abc import Callable

from hvdtrain.jobs import worker_connections
from hvdtrain.jobs.worker_connections import Member, describe_host, end_if_silent

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


def test_on_one_host_only_the_loopback_interface_is_listened_on():
    with contextlib.ExitStack() as stack:
        (listener,) = worker_connections._listen(stack, {}, [])
        assert listener.getsockname()[0] == "127.0.0.1"
