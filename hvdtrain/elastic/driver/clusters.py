"""What the driver of an elastic job works with: hosts with slots, and a store for each world."""

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from horovod.runner.http.http_server import OK, KVStoreHandler, RendezvousHTTPServer

from hvdtrain.elastic.driver.cluster import Slot, say
from hvdtrain.elastic.driver.processes import (
    StartOptions,
    WorkerProcess,
    is_this_host,
    job_environment,
    kill_process,
    start_worker,
)
from hvdtrain.errors import UsageError
from hvdtrain.host.hostfile import HostSlots, address_towards, interfaces, own_addresses

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
    """The rendezvous of a world, on one port of one or several addresses; an OSError if none is free."""

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


LOOPBACK = "127.0.0.1"


class HostCluster:
    """Hosts, in whose slots the driver starts workers. Nothing here waits."""

    def __init__(
        self,
        options: StartOptions,
        job_key: str,
        find_hosts: Callable[[], Sequence[HostSlots]],
        *,
        interface_names: Sequence[str] = (),
        is_fixed: bool = True,
    ) -> None:
        others = [one.name for one in find_hosts() if not is_this_host(one.name)]
        if interface_names:
            self.listen_on = _addresses_of(interface_names)
        elif is_fixed and not others:
            self.listen_on = [LOOPBACK]
        else:
            routes = [route for host in others if (route := address_towards(host)) and route != LOOPBACK]
            all_own = [text.partition("/")[0] for texts in own_addresses().values() for text in texts]
            self.listen_on = list(dict.fromkeys(routes)) or all_own or [LOOPBACK]
        self.hosts = find_hosts
        self.addresses: Sequence[tuple[str, int]] = ()
        self._options, self._job_key = options, job_key
        self._address_for: dict[str, str] = {}

    def start(self, worker: str, slot: Slot, on_exit: Callable[[int], None]) -> WorkerProcess:
        """Start a worker; another thread calls ``on_exit`` with its code, that of a signal is negative."""
        environ = job_environment(self._options.environ, self._job_key, self.addresses)
        process = WorkerProcess()
        start_worker(replace(self._options, environ=environ), worker, slot, on_exit, process)
        threading.Thread(target=self.find_way_to, args=(slot.host,), daemon=True).start()
        return process

    def find_way_to(self, host: str) -> None:
        """Find out which of the addresses a host reaches. It may wait for a name server."""
        route = address_towards(host)
        if route in self.listen_on:
            self._address_for[host] = route

    def address_for(self, host: str) -> str:
        """Return the address under which a host reaches this one."""
        return self._address_for.get(host, self.listen_on[0])

    def kill_far(self, host: str, pid: int, process_seconds: float) -> None:
        """Kill a process of a host if it can be reached, unless its number is another process's now."""
        kill_process(self._options, host, pid, process_seconds)

    def open_store(self, key: str) -> WorldStore:
        """Open the rendezvous of a world, which has this key."""
        return WorldStore(key, self.listen_on)

    def say(self, text: str) -> None:
        """Tell the user, on standard error."""
        say(text)


def _addresses_of(names: Sequence[str]) -> list[str]:
    found = interfaces(loopback=True)
    missing = [name for name in names if name not in found]
    if missing:
        raise UsageError(
            f"--network-interfaces {','.join(names)}: this host has no {missing[0]} with an IPv4 address",
            f"It has: {', '.join(sorted(found))}.",
        )
    return [text.partition("/")[0] for name in names for text in found[name]]
