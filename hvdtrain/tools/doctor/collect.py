"""Collect information on every host: the same steps alone, over ssh and under a launcher."""

import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.tools.doctor.machine import Listeners, connect, machine_info, nearest_existing, open_session
from hvdtrain.tools.doctor.software import software_info
from hvdtrain.tools.doctor.speed import any_slow, compute, message_times, pairs_of

POLL_SECONDS = 0.01


class Transport(Protocol):
    """Exchange of values between agents, step by step. All agents go through the same steps.

    Attributes:
        index: the number of this agent, from 0.
        size: the number of agents.
        title: a short name of the transport that is shown to the user.
        answers: for each step, one answer per agent; None for an agent that did not answer in time.
    """

    index: int
    size: int
    title: str
    answers: dict[str, list[Any]]

    def allgather(self, step: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Collective. Return the values of all agents, in the order of their indices.

        The value of an agent that does not answer in time is None. Later steps do not wait for this agent.

        Args:
            step: name of the step; every step has another one.
            value: the value of this agent, in JSON's types.
            timeout_seconds: how long to wait for the other agents.
        """

    def time_messages(self, first: int, second: int) -> dict[str, Any] | None:
        """Collective, for two agents. Time messages over this transport; None if it does not support that."""

    def close(self) -> None:
        """Leave the transport, without waiting for other agents."""


class LocalTransport:
    """The transport of a single agent."""

    index, size, title = 0, 1, "this host alone"

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}

    def allgather(self, step: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Return a list with the given value only."""
        self.answers[step] = [value]
        return [value]

    def time_messages(self, first: int, second: int) -> None:
        """Return None: there is no other agent."""

    def close(self) -> None:
        """Do nothing."""


def wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Poll a condition, at growing intervals; return whether it became true in time."""
    deadline, pause = time.monotonic() + timeout_seconds, POLL_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.1, 0.1)
    return True


_STEP_SECONDS = 20.0
_PAIR_SECONDS = 60.0
_COMPUTE_SECONDS = 40.0
_MAX_CONNECTING_THREADS = 32


@dataclass(frozen=True)
class CheckOptions:
    """What to collect.

    Attributes:
        frameworks: of "torch" and "tf".
        run_dir: the run directory.
        speed: whether to run the benchmarks.
        timeout_seconds: how long a host may take to collect its own information.
    """

    frameworks: tuple[str, ...]
    run_dir: str
    speed: bool
    timeout_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the options in JSON's types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CheckOptions":
        """Return the options that :meth:`to_dict` was called on."""
        return cls(**{**values, "frameworks": tuple(values["frameworks"])})


@dataclass(frozen=True)
class Agent:
    """A process that takes part in a check.

    Attributes:
        name: name of its host, in the host list or from the launcher.
        slots: number of workers on its host.
        is_leader: whether it is the one agent that collects information about its host.
    """

    name: str
    slots: int
    is_leader: bool


def collect_host_info(options: CheckOptions, agent: Agent) -> dict[str, Any]:
    """Return what an agent reports about its host. Local.

    Loading the frameworks takes seconds, everything else milliseconds. An agent that is not the leader of
    its host reports only about itself.
    """
    identity = {
        "name": agent.name, "slots": agent.slots, "is_leader": agent.is_leader, "process": os.getpid(),
    }  # fmt: skip
    if not agent.is_leader:
        return identity
    software = software_info(options.frameworks, options.timeout_seconds)
    return {**identity, "software": software, **machine_info(Path(options.run_dir))}


def collect(transport: Transport, options: CheckOptions, host_info: dict[str, Any]) -> None:
    """Collective. Run all steps; the answers are then in ``transport.answers``.

    Args:
        transport: between the agents.
        options: what to collect.
        host_info: what :func:`collect_host_info` returned for this agent.
    """
    infos = transport.allgather("host info", host_info, options.timeout_seconds + _STEP_SECONDS)
    leaders = [index for index, info in enumerate(infos) if info and info["is_leader"]]
    is_leader = transport.index in leaders
    _look_for_shared_directory(transport, leaders, options)
    listeners = Listeners(host_info["interfaces"] if is_leader and len(leaders) > 1 else {})
    try:
        endpoints = transport.allgather("endpoints", listeners.endpoints, _STEP_SECONDS)
        others = [index for index in leaders if index != transport.index and endpoints[index]]
        links = _connect({index: endpoints[index] for index in others}) if is_leader else {}
        all_links = transport.allgather("links", links, _STEP_SECONDS)
        if options.speed:
            _measure_compute(transport, is_leader)
            _measure_pairs(transport, leaders, endpoints, all_links)
    finally:
        listeners.close()


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
    folder = nearest_existing(Path(options.run_dir))
    marker: Path | None = folder / f".hvdtrain-doctor-{secrets.token_hex(8)}"
    is_first = bool(leaders) and transport.index == leaders[0]
    try:
        if is_first and marker:
            marker.touch(mode=0o600)
    except OSError:
        marker = None
    try:
        own_path = str(marker) if is_first and marker else None
        paths = transport.allgather("marker", own_path, _STEP_SECONDS)
        path = paths[leaders[0]] if leaders else None
        transport.allgather("marker seen", bool(path) and _is_listed(Path(str(path))), _STEP_SECONDS)
    finally:
        if is_first and marker:
            marker.unlink(missing_ok=True)


def _is_listed(file: Path) -> bool:
    """Return whether the file's folder lists it.

    A network file system may have cached that the file itself does not exist; the listing is read anew.
    """
    try:
        return file.name in os.listdir(file.parent)
    except OSError:
        return False


def _measure_compute(transport: Transport, is_leader: bool) -> None:
    """Collective. Run the compute benchmark on all hosts at once, and again if one of them looks slow."""
    results = transport.allgather("compute", compute() if is_leader else None, _COMPUTE_SECONDS)
    if any_slow(results):
        transport.allgather("compute again", compute() if is_leader else None, _COMPUTE_SECONDS)


def _measure_pairs(transport: Transport, leaders: list[int], endpoints: list[Any], links: list[Any]) -> None:
    """Collective. Time messages between pairs of hosts, one pair at a time to avoid interference."""
    for first, second in pairs_of(leaders):
        working = [
            endpoints[second][name]
            for name, link in ((links[first] or {}).get(str(second)) or {}).items()
            if not link["error"]
        ]
        result: dict[str, Any] | None = None
        if working and transport.index in (first, second):
            result = transport.time_messages(first, second)
            if transport.index == first and result is None:
                result = _time_tcp_messages(working[0])
        transport.allgather(f"pair {first} {second}", result, _PAIR_SECONDS)


def _time_tcp_messages(endpoint: list[Any]) -> dict[str, Any]:
    try:
        with open_session(endpoint) as session:
            return {**message_times(session.send), "used": "TCP"}
    except OSError as error:
        return {"error": str(error)}
