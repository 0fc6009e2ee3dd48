"""Lines over a connection: they arrive as they were sent, nothing waits, long ones are dropped."""

import socket

import pytest

from hvdtrain.elastic.links import LineConnection


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
