"""What the driver of an elastic job works with: processes in slots of hosts, and a store for each world."""

import os
import shlex
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from horovod.runner.common.util.settings import Settings
from horovod.runner.gloo_run import _exec_command_fn, _mkdir_p
from horovod.runner.http.http_server import OK, KVStoreHandler, RendezvousHTTPServer
from horovod.runner.util import network
from horovod.runner.util.remote import get_remote_command

from hvdtrain.elastic.driver.records import SSH_FAILED, Slot, say
from hvdtrain.errors import UsageError
from hvdtrain.host.hostfile import HostSlots, address_towards, interfaces, own_addresses
from hvdtrain.host.launcher import ELASTIC_VARIABLE, SLOT_VARIABLE, WORKER_VARIABLE
from hvdtrain.host.processes import SAME_START_SECONDS, kill_if_same, run_limited
from hvdtrain.workers.world import KEY_VARIABLE

_HOST_VARIABLE = "HOROVOD_HOSTNAME"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
_CONNECT_SECONDS = 5
_KILL_SECONDS = 15
# what belongs to one world, or to another launch that this one runs in
_NOT_PASSED_ON = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_ELASTIC",
    _HOST_VARIABLE, WORKER_VARIABLE, SLOT_VARIABLE,
)  # fmt: skip
_KILL_FAR = """
import sys, psutil
process = psutil.Process(int(sys.argv[1]))
if abs(process.create_time() - float(sys.argv[2])) < float(sys.argv[3]):
    process.kill()
"""


class WorkerProcess:
    """A worker's process, and the processes that start it and forward its output."""

    def __init__(self) -> None:
        self._requests = {number: threading.Event() for number in SIGNALS}
        for number, request in self._requests.items():
            request.signum = number  # type: ignore[attr-defined] # which Horovod's launcher sends
        self._disconnect = threading.Event()  # without a number: end the ssh client
        self._is_far = False
        # what Horovod's launcher waits for while the worker runs
        self.events = [*self._requests.values(), self._disconnect]

    def signal(self, number: int) -> None:
        """Send SIGTERM, SIGINT or SIGKILL, each once. It does not wait, and reaches workers of this host."""
        self._requests[signal.Signals(number)].set()

    def kill(self) -> None:
        """Kill the worker, even a stopped one; end the connection to one on another host. Without waiting."""
        self._requests[signal.SIGKILL].set()
        if self._is_far:
            self._disconnect.set()

    def is_on_another_host(self) -> None:
        """Note that the worker runs on another host, which signals from here do not reach."""
        self._is_far = True
        if self._requests[signal.SIGKILL].is_set():
            self._disconnect.set()


def is_this_host(host: str) -> bool:
    """Return whether workers of a host start without ssh, as Horovod's launcher decides it."""
    return network.resolve_host_address(host) in network.get_local_host_addresses()


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
    """Hosts, in whose slots the driver starts workers; ``options`` are settings of Horovod's launcher.

    Nothing here waits.
    """

    def __init__(
        self,
        command: Sequence[str],
        job_key: str,
        find_hosts: Callable[[], Sequence[HostSlots]],
        *,
        environ: Mapping[str, str] = os.environ,
        interface_names: Sequence[str] = (),
        is_fixed: bool = True,
        **options: Any,
    ) -> None:
        others = [one.name for one in find_hosts() if not is_this_host(one.name)]
        if interface_names:
            found = interfaces(loopback=True)
            if missing := [name for name in interface_names if name not in found]:
                raise UsageError(
                    f"--network-interfaces {','.join(interface_names)}: "
                    f"this host has no {missing[0]} with an IPv4 address",
                    f"It has: {', '.join(sorted(found))}.",
                )
            self.listen_on = [text.partition("/")[0] for name in interface_names for text in found[name]]
        elif is_fixed and not others:
            self.listen_on = [LOOPBACK]
        else:
            routes = [route for host in others if (route := address_towards(host)) and route != LOOPBACK]
            all_own = [text.partition("/")[0] for texts in own_addresses().values() for text in texts]
            self.listen_on = list(dict.fromkeys(routes)) or all_own or [LOOPBACK]
        self.hosts = find_hosts
        self.addresses: Sequence[tuple[str, int]] = ()
        self._command, self._job_key, self._environ = shlex.join(command), job_key, environ
        # of the number of workers, only the width of a rank in the name of an output folder is made; and the
        # end of a worker ends no other one
        self._settings = Settings(**{"num_proc": 2, "verbose": 0, "elastic": True, **options})
        self._address_for: dict[str, str] = {}

    def start(self, worker: str, slot: Slot, on_exit: Callable[[int], None]) -> WorkerProcess:
        """Start a worker, on another host over ssh; its output has its name as tag.

        Another thread calls ``on_exit`` with its exit code, that of a signal is negative.
        """
        process = WorkerProcess()
        if self._settings.output_filename:
            _mkdir_p(self._settings.output_filename)
        execute = _exec_command_fn(self._settings, self._environment(worker, slot))

        def run() -> None:
            code = 1
            try:
                command = self._command
                if is_this_host(slot.host):
                    # A shell that starts the worker and waits for it could be killed in its place, just
                    # before it starts it. On another host, Horovod's launcher writes the same.
                    command = f"exec {command}"
                else:
                    process.is_on_another_host()
                slot_info = SimpleNamespace(rank=worker, hostname=slot.host)  # the tag of its output
                code, _ = execute(command, slot_info, process.events)
            finally:  # a shell's exit code of a signal is 128 and its number
                is_signal = 128 < code < SSH_FAILED and code - 128 in signal.valid_signals()
                on_exit(128 - code if is_signal else code)

        threading.Thread(target=run, name=f"process of {worker}", daemon=True).start()
        threading.Thread(target=self.find_way_to, args=(slot.host,), daemon=True).start()
        return process

    def _environment(self, worker: str, slot: Slot) -> dict[str, str]:
        """Return the environment of a worker."""
        kept = {name: value for name, value in self._environ.items() if name not in _NOT_PASSED_ON}
        return {
            "PYTHONHASHSEED": "0",  # sets of strings must have the same order in all workers
            **kept,
            "PYTHONUNBUFFERED": "1",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            KEY_VARIABLE: self._job_key,
            ELASTIC_VARIABLE: ",".join(f"{address}:{port}" for address, port in self.addresses),
            WORKER_VARIABLE: worker,
            SLOT_VARIABLE: str(slot.number),
            _HOST_VARIABLE: slot.host,
        }

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
        port, key = self._settings.ssh_port, self._settings.ssh_identity_file

        def run() -> None:
            if is_this_host(host):
                kill_if_same(pid, process_seconds)
                return
            words = [sys.executable, "-c", _KILL_FAR, *map(str, (pid, process_seconds, SAME_START_SECONDS))]
            quoted = shlex.quote(shlex.join(words))
            with suppress(OSError):
                command = get_remote_command(quoted, host, port, key, _CONNECT_SECONDS)
                run_limited(["/bin/sh", "-c", command], _KILL_SECONDS)

        threading.Thread(target=run, name=f"end of process {pid}", daemon=True).start()

    def open_store(self, key: str) -> WorldStore:
        """Open the rendezvous of a world, which has this key."""
        return WorldStore(key, self.listen_on)

    def say(self, text: str) -> None:
        """Tell the user, on standard error."""
        say(text)
