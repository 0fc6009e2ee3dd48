"""The connections that are watched: keepalive."""

import socket
from collections.abc import Callable

from hvdtrain.jobs.host_connections import keep_alive


def test_keepalive_ends_a_silent_connection_within_the_time():
    one, other = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with one, other:
        keep_alive(other, 20)
        read: Callable[[int], int] = lambda name: other.getsockopt(socket.IPPROTO_TCP, name)  # noqa: E731
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        total = read(socket.TCP_KEEPIDLE) + read(socket.TCP_KEEPINTVL) * read(socket.TCP_KEEPCNT)
        assert total == 20
