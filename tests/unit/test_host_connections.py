"""The connections that are watched: keepalive, and the token."""

import socket
import threading
from collections.abc import Callable

from hvdtrain.jobs import host_connections
from hvdtrain.jobs.host_connections import HostRanks, keep_alive

H2 = HostRanks("h2", 2, (2,))
TOKEN = b"t" * 32


def test_keepalive_ends_a_silent_connection_within_the_time():
    one, other = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with one, other:
        keep_alive(other, 20)
        read: Callable[[int], int] = lambda name: other.getsockopt(socket.IPPROTO_TCP, name)  # noqa: E731
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        total = read(socket.TCP_KEEPIDLE) + read(socket.TCP_KEEPINTVL) * read(socket.TCP_KEEPCNT)
        assert total == 20


def test_only_connections_with_the_token_are_accepted():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: dict = {}
        accept = threading.Thread(
            target=lambda: found.update(host_connections._accept([listener], TOKEN, {2: H2})), name="accept"
        )
        accept.start()
        address = listener.getsockname()
        assert host_connections._connect_to_rank_0([address], b"x" * 32, 2) is None
        connection = host_connections._connect_to_rank_0([address], TOKEN, 2)
        accept.join(10)
        assert list(found.values()) == [H2]
        connection.close()
        for one in found:
            one.close()
