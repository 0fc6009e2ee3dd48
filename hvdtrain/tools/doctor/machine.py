"""What a host has: names, interfaces, memory, disks, cores, GPUs."""

import contextlib
import hmac
import os
import re
import resource
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.host.hostfile import interfaces, receive_exactly
from hvdtrain.host.processes import run_limited

_CONNECT_SECONDS = 3.0
_SESSION_SECONDS = 20.0
_TOKEN_BYTES = 32
_CHUNK_BYTES = 1 << 18
_MAX_LISTENERS = 4  # interfaces of a host that are tried
_ACKNOWLEDGEMENT = b"!"


class Listeners:
    """The listeners of a host.

    Attributes:
        endpoints: for each interface, what other hosts need to connect: address, port, token.
    """

    def __init__(self, interfaces: Mapping[str, list[str]]) -> None:
        self._token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.endpoints: dict[str, list[Any]] = {}
        for name, addresses in list(interfaces.items())[:_MAX_LISTENERS]:
            address = addresses[0].partition("/")[0]
            with contextlib.suppress(OSError):  # the address has just been removed
                self._listen(name, address)

    def _listen(self, name: str, address: str) -> None:
        listener = socket.create_server((address, 0), backlog=64)
        listener.settimeout(0.2)
        self._sockets.append(listener)
        self.endpoints[name] = [address, listener.getsockname()[1], self._token]
        thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            threading.Thread(target=_serve, args=(connection, self._token), daemon=True).start()

    def close(self) -> None:
        """Close the listeners. Open connections end by themselves."""
        for listener in self._sockets:
            listener.close()
        for thread in self._threads:
            thread.join(1)


def _serve(connection: socket.socket, token: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_SESSION_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = receive_exactly(connection, _TOKEN_BYTES)
        if not hmac.compare_digest(received, token.encode()):
            return
        connection.sendall(struct.pack(">d", time.time()))
        while size := struct.unpack(">Q", receive_exactly(connection, 8))[0]:
            _drain(connection, size)
            connection.sendall(_ACKNOWLEDGEMENT)


def connect(endpoint: list[Any]) -> dict[str, Any]:
    """Connect to one listener of another host.

    Returns:
        ``error``: why it failed, empty if the listener answered. If it did, ``clock``: how many seconds
        its clock is ahead of this host's, and ``trip``: the seconds of the round trip, which are the
        uncertainty of ``clock``.
    """
    try:
        with _connected(endpoint) as (_, clock, trip):
            return {"error": "", "clock": clock, "trip": trip}
    except TimeoutError:
        return {"error": "no answer"}
    except (OSError, struct.error) as error:
        return {"error": (getattr(error, "strerror", None) or str(error)).lower()}


@contextmanager
def open_session(endpoint: list[Any]) -> Iterator["Session"]:
    """Context manager: a connection to a listener over which messages can be sent.

    Raises:
        OSError: If the connection cannot be made, or fails while it is used.
    """
    with _connected(endpoint) as (connection, _, _):
        yield Session(connection)
        connection.sendall(struct.pack(">Q", 0))


class Session:
    """An open connection to a listener."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: memoryview) -> None:
        """Send a message and wait for its acknowledgement."""
        self._connection.sendall(struct.pack(">Q", len(message)))
        self._connection.sendall(message)
        receive_exactly(self._connection, 1)


@contextmanager
def _connected(endpoint: list[Any]) -> Iterator[tuple[socket.socket, float, float]]:
    address, port, token = endpoint
    with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = time.time()
        connection.sendall(token.encode())
        (remote_time,) = struct.unpack(">d", receive_exactly(connection, 8))
        received = time.time()
        connection.settimeout(_SESSION_SECONDS)
        yield connection, remote_time - (sent + received) / 2, received - sent


def _drain(connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while size:
        read = connection.recv_into(buffer, min(size, len(buffer)))
        if not read:
            raise ConnectionError("the connection was closed")
        size -= read


MIB = 2**20
_PROGRAM_SECONDS = 15
# interfaces of containers and virtual machines, which lead to no other host
_VIRTUAL = re.compile(r"(lo$|docker|br-|veth|virbr|vmnet|cni|flannel|cali|cilium|lxc|lxd|podman|kube|dummy)")
_GPU_FIELDS = ("index", "name", "memory.total", "driver_version")


def machine_info(run_dir: Path) -> dict[str, Any]:
    """Return what a host reports about itself, in JSON's types.

    Args:
        run_dir: the run directory, relative to the working directory; it need not exist yet.
    """
    own = socket.gethostname()
    return {
        "hostname": own,
        "addresses": addresses_of(own),
        "own_addresses": sorted(_own_addresses()),
        "interfaces": {name: texts for name, texts in interfaces().items() if not _VIRTUAL.match(name)},
        "directory": _working_directory(),
        "disks": {
            "run directory": _disk(run_dir),
            "temporary directory": _disk(Path(tempfile.gettempdir())),
            "/dev/shm": _disk(Path("/dev/shm")),
        },
        "locked_memory_bytes": _locked_memory(),
        "infiniband": sorted(path.name for path in _children("/sys/class/infiniband")),
        "cores": len(os.sched_getaffinity(0)),
        "cores_of_machine": os.cpu_count() or 1,
        "memory_free_mib": psutil.virtual_memory().available // MIB,
        "gpus": _gpus(),
    }


def addresses_of(name: str) -> list[str]:
    """Return the IPv4 addresses that a name resolves to on this host; empty if it does not resolve."""
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})
    except (OSError, UnicodeError):
        return []


def is_this_host(name: str) -> bool:
    """Return whether a name resolves to an address of this host."""
    addresses = addresses_of(name)
    own = _own_addresses()
    return any(address in own or address.startswith("127.") for address in addresses)


def nearest_existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest parent that does."""
    path = Path(os.path.abspath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _own_addresses() -> set[str]:
    return {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _disk(path: Path) -> dict[str, Any]:
    """Return the free space at a path, or where it would be created, and why nothing can be written there."""
    folder = nearest_existing(path)
    try:
        free = shutil.disk_usage(folder).free // MIB
        return {"path": str(path), "free_mib": free, "error": _write_error(folder)}
    except OSError as error:
        return {"path": str(path), "free_mib": 0, "error": error.strerror or str(error)}


def _write_error(folder: Path) -> str:
    """Return why a page of bytes cannot be written to a folder; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _locked_memory() -> int:
    """Return the limit of locked memory in bytes; -1 if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def _children(folder: str) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(folder).iterdir())
    return []


def _gpus() -> dict[str, Any]:
    """Return the cards that nvidia-smi lists, or its error."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"cards": [], "error": ""}
    try:
        words = [program, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
        done = run_limited(words, _PROGRAM_SECONDS)
    except OSError:
        done = None
    if done is None or done.code is None:
        return {"cards": [], "error": "nvidia-smi does not respond"}
    if done.code:
        return {"cards": [], "error": (done.output + done.errors).strip().partition("\n")[0][:200]}
    return {"cards": parse_cards(done.output), "error": ""}


def parse_cards(text: str) -> list[dict[str, str]]:
    """Parse the output of nvidia-smi: a line per card with index, name, memory in MiB, driver."""
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.strip()]
    return [
        {"name": row[1], "memory_mib": row[2], "driver": row[3]}
        for row in rows
        if len(row) == len(_GPU_FIELDS)
    ]
