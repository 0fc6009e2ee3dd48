"""What every host collects, alone, over ssh and under a launcher alike, with a listener for the others."""

import hmac
import json
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import socketserver
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil

import hvdtrain
from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.installed import (
    TITLES,
    installed_build,
    installed_framework,
    package_folder,
    require_horovod,
    version_of,
)
from hvdtrain.host.hostfile import interfaces, receive_exactly
from hvdtrain.host.processes import run_limited
from hvdtrain.tools.doctor.transports import Transport

_PREFIX = "hvdtrain-probe:"
_PROGRAM_SECONDS = 15
_PACKAGES = {"Keras": "keras", "NumPy": "numpy", "mpi4py": "mpi4py"}
# Each one sets `info`, which is printed after the prefix; what the framework itself prints is ignored.
_CODE = {
    "torch": """
import json, torch, horovod.torch
info = {"version": torch.__version__}
if torch.cuda.is_available():
    count = torch.cuda.device_count()
    info["gpus"] = {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
""",
    "tf": """
import json, tensorflow, horovod.tensorflow
info = {"version": tensorflow.__version__}
gpus = tensorflow.config.list_physical_devices("GPU")
if gpus:
    info["gpus"] = {"gpus": [gpu.name for gpu in gpus]}
""",
    "mpi4py": """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
info = {"version": MPI.Get_library_version().split(",")[0].strip()}
""",
}
# With the launcher's variables, the probe would join the launcher's job.
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HOROVOD_", "SLURM_")


def _probe(name: str, seconds: float) -> dict[str, Any]:
    """Load a framework with Horovod's extension, or mpi4py, in a child process; return its ``info``."""
    try:
        if name in TITLES:
            require_horovod(name)
    except HorovodBuildError as error:
        return {"error": error.problem}
    code = f"{_CODE[name]}\nprint({_PREFIX!r} + json.dumps(info), flush=True)"
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER_PREFIXES)}
    environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        done = run_limited([sys.executable, "-c", code], seconds, environ)
    except OSError as error:
        return {"error": f"{sys.executable} cannot be started: {error.strerror}"}
    if done.code is None:
        return {"error": f"loading it took longer than {seconds:.0f} s"}
    for line in done.output.splitlines():
        if line.startswith(_PREFIX):
            info: dict[str, Any] = json.loads(line.removeprefix(_PREFIX))
            return info
    if done.code < 0:
        return {"error": f"loading it ended with {signal.Signals(-done.code).name}"}
    lines = [line.strip() for line in done.errors.splitlines() if line.strip()]
    return {"error": lines[-1][:300] if lines else f"loading it ended with exit code {done.code}"}


def software_info(frameworks: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Return what is installed, and whether it loads, each framework within some seconds."""
    build = installed_build()
    installed = {name: found for name in frameworks if (found := installed_framework(name))}
    names = [*installed, *(["mpi4py"] if package_folder("mpi4py") else [])]
    with ThreadPoolExecutor(4) as pool:
        mpirun = pool.submit(_mpirun)
        probed = dict(zip(names, pool.map(lambda name: _probe(name, seconds), names), strict=True))
    mpi4py = probed.pop("mpi4py", {})
    packages = {title: name for title, name in _PACKAGES.items() if title != "Keras" or "tf" in frameworks}
    return {
        "versions": {
            "Python": platform.python_version(),
            "hvdtrain": f"{hvdtrain.__version__}, files {_digest(Path(hvdtrain.__file__).parent)}",
            **{TITLES[name]: installed[name].version if name in installed else "" for name in frameworks},
            **{title: version_of(name) for title, name in packages.items()},
            "Horovod": build.identify() if build else "",
            "MPI": mpirun.result(),
        },
        "python": sys.executable,
        "build_key": build.key if build else "",
        "nccl_build": bool(build and build.nccl),
        "horovod": {name: found.get("error", "") for name, found in probed.items()},
        "mpi": {
            "Horovod": (build.mpi or "") if build else "",
            "mpi4py": mpi4py.get("version", ""),
            "mpi4py error": mpi4py.get("error", ""),
        },
        "gpus": {name: gpus for name, found in probed.items() if (gpus := found.get("gpus"))},
    }


def _mpirun() -> str:
    """Return the name and version of the mpirun on PATH."""
    program = shutil.which("mpirun")
    if program is None:
        return ""
    try:
        done = run_limited([program, "--version"], _PROGRAM_SECONDS)
    except OSError as error:
        return f"{program} does not run: {error.strerror}"
    first = (done.output or done.errors).strip().partition("\n")[0]
    if done.code != 0:
        return f"{program} does not run: {'it took too long' if done.code is None else first[:100]}"
    return first.removeprefix("mpirun ").replace("(", "").replace(")", "")


def _digest(folder: Path) -> str:
    """Return a digest of the package's source: different checkouts may have the same version number."""
    digest = blake2b(digest_size=4)
    for path in sorted(folder.rglob("*.py")):
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


_MIB = 2**20
_CONNECT_SECONDS = 3.0
_SESSION_SECONDS = 20.0
_TOKEN_BYTES = 32
_MAX_LISTENERS = 4  # interfaces of a host that are tried
# interfaces of containers and virtual machines, which lead to no other host
_VIRTUAL = re.compile(r"(lo$|docker|br-|veth|virbr|vmnet|cni|flannel|cali|cilium|lxc|lxd|podman|kube|dummy)")
# of a card, with the fields of nvidia-smi
_CARD = {"name": "name", "memory_mib": "memory.total", "driver": "driver_version"}


class _Listener(socketserver.ThreadingTCPServer):
    """Sends its time to who sends the token."""

    daemon_threads, block_on_close, request_queue_size = True, False, 64
    token = ""

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError, struct.error):
            request.settimeout(_SESSION_SECONDS)
            request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(receive_exactly(request, _TOKEN_BYTES), self.token.encode()):
                return
            request.sendall(struct.pack(">d", time.time()))


class Listeners(ExitStack):
    """Context manager: the listeners of a host, one per interface. Open connections end by themselves."""

    def __init__(self, interfaces: Mapping[str, list[str]]) -> None:
        super().__init__()
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        self.endpoints: dict[str, list[Any]] = {}
        for name, addresses in list(interfaces.items())[:_MAX_LISTENERS]:
            with suppress(OSError):  # the address has just been removed
                server = _Listener((addresses[0].partition("/")[0], 0), socketserver.BaseRequestHandler)
                server.token = token
                threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
                self.callback(server.server_close)
                self.callback(server.shutdown)
                self.endpoints[name] = [*server.server_address[:2], token]


def connect(endpoint: list[Any]) -> dict[str, Any]:
    """Connect to one listener of another host.

    Return ``error``: why it failed, empty if the listener answered. If it did, ``clock``: how many seconds
    its clock is ahead of this host's, and ``trip``: the seconds of the round trip, its uncertainty.
    """
    try:
        address, port, token = endpoint
        with socket.create_connection((address, port), _CONNECT_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sent = time.time()
            connection.sendall(token.encode())
            (remote_time,) = struct.unpack(">d", receive_exactly(connection, 8))
            received = time.time()
        return {"error": "", "clock": remote_time - (sent + received) / 2, "trip": received - sent}
    except TimeoutError:
        return {"error": "no answer"}
    except (OSError, struct.error) as error:
        return {"error": (getattr(error, "strerror", None) or str(error)).lower()}


def addresses_of(name: str) -> list[str]:
    """Return the IPv4 addresses that a name resolves to on this host; empty if it does not resolve."""
    with suppress(OSError, UnicodeError):
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})
    return []


def is_this_host(name: str) -> bool:
    """Return whether a name resolves to an address of this host."""
    own = _own_addresses()
    return any(address in own or address.startswith("127.") for address in addresses_of(name))


def nearest_existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest parent that does."""
    path = Path(os.path.abspath(path))
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _own_addresses() -> set[str]:
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    return {entry.address for entry in entries if entry.family == socket.AF_INET}


def _disk(path: Path) -> dict[str, Any]:
    """Return the free space where a path is or would be, and why a page cannot be written there."""
    found: dict[str, Any] = {"path": str(path), "free_mib": 0, "error": ""}
    try:
        folder = nearest_existing(path)
        found["free_mib"] = shutil.disk_usage(folder).free // _MIB
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def _gpus() -> dict[str, Any]:
    """Return the cards that nvidia-smi lists, or its error."""
    if (program := shutil.which("nvidia-smi")) is None:
        return {"cards": [], "error": ""}
    with suppress(OSError):
        words = [program, f"--query-gpu={','.join(_CARD.values())}", "--format=csv,noheader,nounits"]
        done = run_limited(words, _PROGRAM_SECONDS)
        if done.code == 0:
            rows = [[word.strip() for word in line.split(",")] for line in done.output.splitlines()]
            cards = [dict(zip(_CARD, row, strict=True)) for row in rows if len(row) == len(_CARD)]
            return {"cards": cards, "error": ""}
        if done.code is not None:
            return {"cards": [], "error": (done.output + done.errors).strip().partition("\n")[0][:200]}
    return {"cards": [], "error": "nvidia-smi does not respond"}


_STEP_SECONDS = 20.0
_MAX_CONNECTING_THREADS = 32


@dataclass(frozen=True)
class CheckOptions:
    """What to collect."""

    frameworks: tuple[str, ...]  # of "torch" and "tf"
    run_dir: str  # the run directory
    timeout_seconds: float  # how long a host may take to collect its own information


def collect_host_info(options: CheckOptions, name: str, slots: int, is_leader: bool = True) -> dict[str, Any]:
    """Return what an agent reports about its host, in JSON's types. Local."""
    identity = {"name": name, "slots": slots, "is_leader": is_leader, "process": os.getpid()}
    if not is_leader:
        return identity
    own, directory = socket.gethostname(), ""
    with suppress(OSError):  # it was removed
        directory = os.getcwd()
    return {
        **identity,
        "software": software_info(options.frameworks, options.timeout_seconds),
        "hostname": own,
        "addresses": addresses_of(own),
        "own_addresses": sorted(_own_addresses()),
        "interfaces": {name: texts for name, texts in interfaces().items() if not _VIRTUAL.match(name)},
        "directory": directory,
        "disks": {
            "run directory": _disk(Path(options.run_dir)),  # which need not exist yet
            "temporary directory": _disk(Path(tempfile.gettempdir())),
            "/dev/shm": _disk(Path("/dev/shm")),
        },
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
    }


def collect(transport: Transport, options: CheckOptions, host_info: dict[str, Any]) -> None:
    """Collective. Run all steps; the answers, host infos first, are in ``transport.answers``."""
    infos = transport.allgather("host info", host_info, options.timeout_seconds + _STEP_SECONDS)
    leaders = [index for index, info in enumerate(infos) if info and info["is_leader"]]
    is_leader = transport.index in leaders
    _look_for_shared_directory(transport, leaders, options)
    with Listeners(host_info["interfaces"] if is_leader and len(leaders) > 1 else {}) as listeners:
        endpoints = transport.allgather("endpoints", listeners.endpoints, _STEP_SECONDS)
        others = [index for index in leaders if is_leader and index != transport.index and endpoints[index]]
        tries = [(index, name, end) for index in others for name, end in endpoints[index].items()]
        with ThreadPoolExecutor(_MAX_CONNECTING_THREADS) as pool:
            results = list(pool.map(lambda one: connect(one[2]), tries))
        links: dict[str, dict[str, Any]] = {str(index): {} for index in others}  # by agent and interface
        for (index, name, _), result in zip(tries, results, strict=True):
            links[str(index)][name] = result
        transport.allgather("links", links, _STEP_SECONDS)


def _look_for_shared_directory(transport: Transport, leaders: list[int], options: CheckOptions) -> None:
    """Collective. Create a file in the first host's run directory; each host reports whether it sees it."""
    marker: Path | None = None
    try:
        if transport.index in leaders[:1]:
            file = nearest_existing(Path(options.run_dir)) / f".hvdtrain-doctor-{secrets.token_hex(8)}"
            with suppress(OSError):  # the check of the disk reports it
                file.touch(mode=0o600)
                marker = file
        paths = transport.allgather("marker", str(marker) if marker else None, _STEP_SECONDS)
        path, is_seen = Path(paths[leaders[0]] or "/" if leaders else "/"), False
        with suppress(OSError):  # a network file system may have cached that the file itself does not exist
            is_seen = path.name in os.listdir(path.parent)
        transport.allgather("marker seen", is_seen, _STEP_SECONDS)
    finally:
        if marker:
            marker.unlink(missing_ok=True)
