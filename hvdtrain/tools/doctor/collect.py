"""Collect information on every host: the same steps alone, over ssh and under a launcher."""

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.tools.doctor.machine import Listeners, connect, machine_info, nearest_existing, open_session
from hvdtrain.tools.doctor.software import software_info
from hvdtrain.tools.doctor.speed import any_slow, compute, message_times, pairs_of
from hvdtrain.tools.doctor.transports import Transport

_STEP_SECONDS = 20.0
_PAIR_SECONDS = 60.0
_COMPUTE_SECONDS = 40.0
_MAX_CONNECTING_THREADS = 32


@dataclass(frozen=True)
class CheckOptions:
    """What to collect."""

    frameworks: tuple[str, ...]  # of "torch" and "tf"
    run_dir: str  # the run directory
    speed: bool  # whether to run the benchmarks
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
        all_links = transport.allgather("links", links, _STEP_SECONDS)
        if not options.speed:
            return
        results = transport.allgather("compute", compute() if is_leader else None, _COMPUTE_SECONDS)
        if any_slow(results):
            transport.allgather("compute again", compute() if is_leader else None, _COMPUTE_SECONDS)
        for first, second in pairs_of(leaders):  # one pair at a time, to avoid interference
            tried = (all_links[first] or {}).get(str(second)) or {}
            working = [endpoints[second][name] for name, link in tried.items() if not link["error"]]
            result: dict[str, Any] | None = None
            if working and transport.index in (first, second):
                result = transport.time_messages(first, second)
                if transport.index == first and result is None:
                    result = _time_tcp_messages(working[0])
            transport.allgather(f"pair {first} {second}", result, _PAIR_SECONDS)


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
            try:
                file.touch(mode=0o600)
                marker = file
            except OSError:
                pass  # the check of the disk reports it
        paths = transport.allgather("marker", str(marker) if marker else None, _STEP_SECONDS)
        path = paths[leaders[0]] if leaders else None
        transport.allgather("marker seen", bool(path) and _is_listed(Path(str(path))), _STEP_SECONDS)
    finally:
        if marker:
            marker.unlink(missing_ok=True)


def _is_listed(file: Path) -> bool:
    """Return whether the file's folder lists it.

    A network file system may have cached that the file itself does not exist; the listing is read anew.
    """
    try:
        return file.name in os.listdir(file.parent)
    except OSError:
        return False


def _time_tcp_messages(endpoint: list[Any]) -> dict[str, Any]:
    try:
        with open_session(endpoint) as send:
            return {**message_times(send), "used": "TCP"}
    except OSError as error:
        return {"error": str(error)}
