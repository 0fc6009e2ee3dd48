"""Collect information on every host: alone, over ssh and under a launcher alike."""

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.tools.doctor.machine import Listeners, connect, machine_info, nearest_existing
from hvdtrain.tools.doctor.software import software_info
from hvdtrain.tools.doctor.transports import Transport

_STEP_SECONDS = 20.0
_MAX_CONNECTING_THREADS = 32


@dataclass(frozen=True)
class CheckOptions:
    """What to collect."""

    frameworks: tuple[str, ...]  # of "torch" and "tf"
    run_dir: str  # the run directory
    timeout_seconds: float  # how long a host may take to collect its own information


def collect_host_info(options: CheckOptions, name: str, slots: int, is_leader: bool = True) -> dict[str, Any]:
    """Return what an agent reports about its host. Local.

    Loading the frameworks takes seconds, everything else milliseconds. An agent that is not the leader of its
    host reports only about itself.
    """
    identity = {"name": name, "slots": slots, "is_leader": is_leader, "process": os.getpid()}
    if not is_leader:
        return identity
    software = software_info(options.frameworks, options.timeout_seconds)
    return {**identity, "software": software, **machine_info(Path(options.run_dir))}


def collect(transport: Transport, options: CheckOptions, host_info: dict[str, Any]) -> None:
    """Collective. Run all steps; the answers, host infos first, are in ``transport.answers``."""
    infos = transport.allgather("host info", host_info, options.timeout_seconds + _STEP_SECONDS)
    leaders = [index for index, info in enumerate(infos) if info and info["is_leader"]]
    is_leader = transport.index in leaders
    _look_for_shared_directory(transport, leaders, options)
    with Listeners(host_info["interfaces"] if is_leader and len(leaders) > 1 else {}) as listeners:
        endpoints = transport.allgather("endpoints", listeners.endpoints, _STEP_SECONDS)
        others = [index for index in leaders if index != transport.index and endpoints[index]]
        links = _connect({index: endpoints[index] for index in others}) if is_leader else {}
        transport.allgather("links", links, _STEP_SECONDS)


def _connect(endpoints: dict[int, dict[str, list[Any]]]) -> dict[str, dict[str, Any]]:
    """Connect to all listeners of the other hosts; return the results by agent and interface."""
    tries = [(index, name, end) for index, of_host in endpoints.items() for name, end in of_host.items()]
    with ThreadPoolExecutor(_MAX_CONNECTING_THREADS) as pool:
        results = list(pool.map(lambda one: connect(one[2]), tries))
    links: dict[str, dict[str, Any]] = {str(index): {} for index in endpoints}
    for (index, name, _), result in zip(tries, results, strict=True):
        links[str(index)][name] = result
    return links


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
