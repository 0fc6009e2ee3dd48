"""How a function goes to the workers that are launched for it, and how results and errors come back.

A worker connects, sends a request and gets the response. Whatever is sent carries a proof by a key of 256
random bits that is made for the launch, and is made for this one connection, so that nothing is unpickled
that does not come from a process with the key.
"""

import hmac
import os
import secrets
import socket
import socketserver
import struct
import threading
from contextlib import suppress
from io import BufferedReader
from typing import Any

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.hostfile import own_addresses

ADDRESS_VARIABLE = "HVDTRAIN_LAUNCH_ADDRESS"  # "10.0.0.1,10.1.0.1:4567", of the process that launched
KEY_VARIABLE = "HVDTRAIN_LAUNCH_KEY"
FUNCTION, RESULT, ERROR = b"F", b"R", b"E"  # the first byte of a request

_SECONDS = 600.0  # in which a function, or a result, has arrived
_STRANGER_SECONDS = 20.0  # in which a connection proves that it has the key
_CONNECT_SECONDS = 3.0  # for each address of the process that launched
_NONCE, _PROOF = 32, 32


class Channel(socketserver.ThreadingTCPServer):
    """Context manager: the end of the launching process.

    Attributes:
        environ: what workers need to reach it; secret.
        received: the results and the errors that have come, in their order, by kind.
    """

    daemon_threads, block_on_close, request_queue_size = True, False, 128

    def __init__(self, function: bytes, is_local: bool) -> None:
        super().__init__(("127.0.0.1" if is_local else "", 0), socketserver.BaseRequestHandler)
        self._function = function
        self._key = secrets.token_hex(32)
        self.received: dict[bytes, list[bytes]] = {RESULT: [], ERROR: []}
        own = [] if is_local else [text.partition("/")[0] for one in own_addresses().values() for text in one]
        place = f"{','.join([*own, '127.0.0.1'])}:{self.server_address[1]}"
        self.environ = {ADDRESS_VARIABLE: place, KEY_VARIABLE: self._key}
        threading.Thread(target=self.serve_forever, args=(0.1,), name="hvdtrain launch", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer one request; a connection without the proof is closed."""
        with suppress(OSError):
            request.settimeout(_STRANGER_SECONDS)
            nonce = secrets.token_bytes(_NONCE)
            request.sendall(nonce)
            with request.makefile("rb") as stream:
                body = _receive(request, stream, self._key, nonce)
            if body[:1] in self.received:
                self.received[body[:1]].append(body[1:])
            _send(request, self._key, nonce[::-1], self._function if body == FUNCTION else b"")


class WorkerEnd:
    """The end of a worker, which takes place and key from its environment."""

    def __init__(self) -> None:
        hosts, _, port = os.environ.pop(ADDRESS_VARIABLE).rpartition(":")
        self._key = os.environ.pop(KEY_VARIABLE)
        self._hosts, self._port = hosts.split(","), int(port)

    def request(self, kind: bytes, body: bytes = b"") -> bytes:
        """Send a request, and return the response.

        Raises:
            EnvironmentFault: If the process that launched cannot be reached.
        """
        problem: Exception | None = None
        for host in self._hosts:
            try:
                with socket.create_connection((host, self._port), _CONNECT_SECONDS) as connection:
                    connection.settimeout(_STRANGER_SECONDS)
                    with connection.makefile("rb") as stream:
                        nonce = _exactly(stream, _NONCE)
                        connection.settimeout(_SECONDS)
                        _send(connection, self._key, nonce, kind + body)
                        response = _receive(connection, stream, self._key, nonce[::-1])
                self._hosts = [host]
                return response
            except OSError as error:
                problem = error
        raise EnvironmentFault(
            f"cannot reach the process that launched: {', '.join(self._hosts)}, port {self._port}: {problem}",
            "Can this host reach the one that launched? See: python -m hvdtrain doctor -H HOSTS.",
        )


def _proof(key: str, *parts: bytes) -> bytes:
    return hmac.digest(key.encode(), b"".join(parts), "sha256")


def _send(connection: socket.socket, key: str, nonce: bytes, body: bytes) -> None:
    size = struct.pack(">Q", len(body))
    connection.sendall(size + _proof(key, nonce, size))
    connection.sendall(body)
    connection.sendall(_proof(key, nonce, size, body))


def _receive(connection: socket.socket, stream: BufferedReader, key: str, nonce: bytes) -> bytes:
    """Return what the other end sent; its proof of the size comes first."""
    size = _exactly(stream, 8)
    _check(_exactly(stream, _PROOF), _proof(key, nonce, size))
    connection.settimeout(_SECONDS)
    body = _exactly(stream, struct.unpack(">Q", size)[0])
    _check(_exactly(stream, _PROOF), _proof(key, nonce, size, body))
    return body


def _check(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise ConnectionError("what answers there does not have the key of this launch")


def _exactly(stream: BufferedReader, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise ConnectionError("the connection was closed, as it is to who does not have the key")
    return data
