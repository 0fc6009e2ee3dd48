"""The rendezvous of one world: Horovod's keyed store, for this world's workers alone."""

import socket
import socketserver
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from horovod.runner.http.http_server import OK, KVStoreHandler, RendezvousHTTPServer

# A request for a key that is not there yet waits so long: workers then ask once, not every 10 ms.
_LONG_POLL_SECONDS = 1.0
_TRIES = 20


class _Values:
    """The keys and values of a store, which several servers share, one for each address."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def get(self, scope: str, key: str) -> bytes | None:
        """Return a value, waiting a moment for it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (scope, key) in self._values, timeout=_LONG_POLL_SECONDS
            )
            return None if self._is_closed else self._values.get((scope, key))

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Keep a value, and wake up who waits for it."""
        with self._changed:
            self._values[scope, key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class _Handler(KVStoreHandler):
    """Answers requests of workers that have the world's key, which the base class checks."""

    server: "_Server"

    def _get_value(self, scope: str, key: str) -> bytes | None:
        return self.server.values.get(scope, key)

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        self.server.values.put(scope, key, value)

    def do_DELETE(self) -> None:  # noqa: N802 - the name that the base class calls
        """Keep the value: another worker may not have read it yet, and the store lives for one world."""
        self.send_status_code(OK)


class _Server(RendezvousHTTPServer):
    """A server on one address."""

    def __init__(self, address: tuple[str, int], key: str, values: _Values) -> None:
        super().__init__(address, _Handler, 0, key)
        self.values = values

    def server_bind(self) -> None:
        """Bind, without the look-up of this host's full name, for which a name server may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def end(self) -> None:
        """Stop to listen, and end all connections, at once."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with self._connections_lock:
            for request in list(self._connections):
                self._end(request)
        threading.Thread(target=self._finish, name="end of a store", daemon=True).start()

    def _finish(self) -> None:
        self.shutdown()
        self.server_close()


class WorldStore:
    """The rendezvous of a world, on one port of one or several addresses of this host.

    Args:
        key: the world's key; requests without it are refused.
        addresses: where it listens.

    Attributes:
        port: where it listens.

    Raises:
        OSError: If no port is free on all addresses.
    """

    def __init__(self, key: str, addresses: Sequence[str]) -> None:
        self._values = _Values()
        self._servers = self._listen(key, list(dict.fromkeys(addresses)))
        self.port = int(self._servers[0].server_address[1])
        for server in self._servers:
            serve: Any = server.serve_forever
            threading.Thread(target=serve, args=(0.1,), name="store of a world", daemon=True).start()

    def _listen(self, key: str, addresses: list[str]) -> list[_Server]:
        problem = ""
        for _ in range(_TRIES):
            servers: list[_Server] = []
            try:
                for address in addresses:  # the first chooses the port
                    port = servers[0].server_address[1] if servers else 0
                    servers.append(_Server((address, port), key, self._values))
                    servers[-1].gate = servers[0].gate  # a request counts once, whatever the address
            except OSError as error:
                problem = str(error)
                for server in servers:
                    server.server_close()
                time.sleep(0.01)
            else:
                return servers
        raise OSError(f"its rendezvous cannot listen on {', '.join(addresses)}: {problem}")

    def close(self) -> None:
        """Stop to listen, and end all connections. It does not wait."""
        self._values.close()
        for server in self._servers:
            server.end()
