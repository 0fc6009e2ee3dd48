"""Inter-process communication between a worker and its readers: pickled objects over a stream socket.

The bytes of arrays follow the pickle unchanged, so each array is copied only once on either side.
"""

import pickle
import socket
import struct
from typing import Any

import numpy as np

_NUMBER = struct.Struct("<Q")


def send(connection: socket.socket, value: Any) -> None:
    """Send an object.

    Raises:
        OSError: If the other side has closed the connection.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [buffer.raw() for buffer in buffers]
    sizes = [len(head), *(part.nbytes for part in parts)]
    connection.sendall(b"".join(_NUMBER.pack(number) for number in (len(sizes), *sizes)) + head)
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> Any:
    """Return the next object, waiting for it if necessary.

    Raises:
        EOFError: If the other side has closed the connection.
    """
    (count,) = _NUMBER.unpack(_receive_bytes(connection, _NUMBER.size))
    table = _receive_bytes(connection, count * _NUMBER.size)
    head, *sizes = [_NUMBER.unpack_from(table, k * _NUMBER.size)[0] for k in range(count)]
    pickled = _receive_bytes(connection, head)
    return pickle.loads(pickled, buffers=[_receive_bytes(connection, size) for size in sizes])


def _receive_bytes(connection: socket.socket, size: int) -> memoryview:
    view = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
    done = 0
    while done < size:
        try:
            count = connection.recv_into(view[done:])
        except ConnectionError:
            count = 0
        if count == 0:
            raise EOFError("the other side has closed the connection")
        done += count
    return view
