"""What a host has: names, interfaces, memory, disks, cores, GPUs."""

import contextlib
import os
import re
import resource
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.host.network import interfaces
from hvdtrain.host.processes import run_limited

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
