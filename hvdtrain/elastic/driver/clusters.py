"""What the driver of an elastic job works with: hosts with slots, or a step that a scheduler runs."""

import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    kill_by_command,
    kill_process,
    start_worker,
)
from hvdtrain.errors import UsageError
from hvdtrain.host.hostfile import HostSlots, interfaces, own_addresses

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


LOOPBACK = "127.0.0.1"


class _Addresses:
    """The addresses of this host at which the others reach it.

    Args:
        names: interfaces that the user chose; empty for those on the way to the hosts.
        hosts: the other hosts that are known.
        is_alone: whether the job never has another host.

    Attributes:
        listening: all of them.

    Raises:
        UsageError: If this host does not have a chosen interface.
    """

    def __init__(self, names: Sequence[str], hosts: Iterable[str], *, is_alone: bool) -> None:
        if names:
            self.listening = _addresses_of(names)
        elif is_alone:
            self.listening = [LOOPBACK]
        else:
            routes = [route for host in hosts if (route := _route_to(host)) and route != LOOPBACK]
            all_own = [text.partition("/")[0] for texts in own_addresses().values() for text in texts]
            self.listening = list(dict.fromkeys(routes)) or all_own or [LOOPBACK]
        self._by_host: dict[str, str] = {}

    def learn(self, host: str) -> None:
        """Find out which of the addresses a host reaches. It may wait for a name server."""
        route = _route_to(host)
        if route in self.listening:
            self._by_host[host] = route

    def for_host(self, host: str) -> str:
        """Return the address that a host reaches."""
        return self._by_host.get(host, self.listening[0])


def _addresses_of(names: Sequence[str]) -> list[str]:
    found = interfaces(loopback=True)
    missing = [name for name in names if name not in found]
    if missing:
        raise UsageError(
            f"--network-interfaces {','.join(names)}: this host has no {missing[0]} with an IPv4 address",
            f"It has: {', '.join(sorted(found))}.",
        )
    return [text.partition("/")[0] for name in names for text in found[name]]


def _route_to(host: str) -> str:
    """Return the address of this host on the way to another one; empty if there is no way."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((host, 9))  # sends nothing
        return str(route.getsockname()[0])
    return ""


class _ListeningHost:
    """What both kinds of cluster have: the driver's own host, where it listens and speaks.

    Args:
        own: the addresses of this host.
        job_key: the key of the job.
        name: of the launcher, in what it says.
    """

    def __init__(self, own: _Addresses, job_key: str, name: str) -> None:
        self.addresses: Sequence[tuple[str, int]] = ()
        self.listen_on: Sequence[str] = own.listening
        self._own, self._job_key, self._name = own, job_key, name

    def open_store(self, key: str, size: int) -> WorldStore:
        """Open the rendezvous of a world."""
        return WorldStore(key, self.listen_on)

    def address_for(self, host: str) -> str:
        """Return the address under which a host reaches this one."""
        return self._own.for_host(host)

    def say(self, text: str) -> None:
        """Tell the user, on standard error."""
        say(self._name, text)


class HostCluster(_ListeningHost):
    """Hosts, in whose slots the driver starts workers.

    Args:
        options: how workers are started; their environment is that of the launcher.
        job_key: the key of the job.
        find_hosts: returns the hosts that there are now.
        interface_names: the network interfaces that the user chose; empty for all.
        is_fixed: whether the hosts stay the same.
        name: of the launcher, in what it says.

    Attributes:
        can_start: that the driver starts workers.
        addresses: where the driver listens; workers receive it.
        listen_on: the addresses of this host at which the job's hosts reach it.
        is_one_host: whether the job never has another host than this one.
    """

    can_start = True

    def __init__(
        self,
        options: StartOptions,
        job_key: str,
        find_hosts: Callable[[], Sequence[HostSlots]],
        *,
        interface_names: Sequence[str] = (),
        is_fixed: bool = True,
        name: str = "horovodrun",
    ) -> None:
        others = [one.name for one in find_hosts() if not is_this_host(one.name)]
        self.is_one_host = is_fixed and not others and not interface_names
        own = _Addresses(interface_names, others, is_alone=self.is_one_host)
        super().__init__(own, job_key, name)
        self._options, self._find_hosts = options, find_hosts
        self._running: dict[str, WorkerProcess] = {}

    def hosts(self) -> Sequence[HostSlots]:
        """Return the hosts that there are now."""
        return self._find_hosts()

    def start(self, worker: str, slot: Slot, on_exit: Callable[[int], None]) -> WorkerProcess:
        """Start a worker."""
        environ = job_environment(self._options.environ, self._job_key, self.addresses)

        def ended(code: int) -> None:
            del self._running[worker]
            on_exit(code)

        process = WorkerProcess()
        self._running[worker] = process
        start_worker(replace(self._options, environ=environ), worker, slot, ended, process)
        threading.Thread(target=self._own.learn, args=(slot.host,), daemon=True).start()
        return process

    def kill_far(self, host: str, pid: int, process_seconds: float) -> None:
        """Kill a process of a host."""
        kill_process(self._options, host, pid, process_seconds)

    def close(self, seconds: float) -> list[str]:
        """Wait until all workers have ended; then kill the others, and return their names."""
        left = self._wait(seconds)
        for worker in left:
            if process := self._running.get(worker):
                process.kill()
        if left:
            self._wait(10.0)
        return left

    def _wait(self, seconds: float) -> list[str]:
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            time.sleep(0.02)
        return list(self._running)


class StepCluster(_ListeningHost):
    """Workers that another launcher starts, such as Slurm's srun: they come by themselves.

    Args:
        job_key: the key of the job.
        environ: the environment of this process.
        interface_names: the network interfaces that the user chose; empty for all.
        name: of the launcher, in what it says.

    Attributes:
        can_start: that the driver starts no workers.
        addresses: where the driver listens; workers receive it.
        listen_on: the addresses of this host at which the job's hosts reach it.
    """

    can_start = False

    def __init__(
        self, job_key: str, environ: Mapping[str, str], *, interface_names: Sequence[str] = (), name: str = ""
    ) -> None:
        super().__init__(_Addresses(interface_names, [], is_alone=False), job_key, name)
        self._environ = environ

    def hosts(self) -> Sequence[HostSlots]:
        """Return no host: which there are is known when workers have come."""
        return []

    def start(self, worker: str, slot: Slot, on_exit: Callable[[int], None]) -> WorkerProcess:
        """Raise an error: only the launcher of the step starts workers."""
        raise NotImplementedError(f"{worker} cannot be started: the workers of a step come by themselves")

    def kill_far(self, host: str, pid: int, process_seconds: float) -> None:
        """Kill a process of a host, through Slurm if it runs the step, else over ssh."""
        if self._environ.get("SLURM_JOB_ID") and shutil.which("srun"):
            words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
            kill_by_command(words, pid, process_seconds)
        else:
            kill_process(StartOptions([]), host, pid, process_seconds)

    def environment(self) -> dict[str, str]:
        """Return the environment of the step, from which its workers know the driver."""
        return job_environment(self._environ, self._job_key, self.addresses)
