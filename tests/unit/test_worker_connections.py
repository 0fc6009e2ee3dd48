"""The connections that are watched: when the kernel ends them, and the token."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from hvdtrain.elastic.watch import connections as worker_connections
from hvdtrain.elastic.watch.connections import Member, describe_host, end_if_silent

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


def test_a_worker_that_was_crowded_out_tries_again():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            accepted.append(listener.accept()[0])
            accepted[0].sendall(b"+")

        accepted: list[socket.socket] = []
        thread = threading.Thread(target=accept)
        thread.start()
        connection = worker_connections._connect_to_rank_0([list(listener.getsockname())], b"t", 1)
        thread.join(60)
        assert connection is not None
        connection.close()
        accepted[0].close()


def test_addresses_that_refuse_or_do_not_answer_are_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        refusing = list(gone.getsockname())
        gone.close()
        start = time.monotonic()
        addresses = [list(silent.getsockname()), refusing]
        assert worker_connections._connect_to_rank_0(addresses, b"t", 1, seconds=0.4) is None
        assert 0.7 < time.monotonic() - start < 20
    assert worker_connections._connect_to_rank_0([], b"t", 1) is None
