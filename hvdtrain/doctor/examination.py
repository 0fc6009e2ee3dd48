"""The examination: the same program on every host, alone, over ssh or under a launcher."""

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.doctor.exchange import Exchange
from hvdtrain.doctor.machine import existing, machine_facts
from hvdtrain.doctor.ports import Listeners, connect, conversation
from hvdtrain.doctor.software import software_facts
from hvdtrain.doctor.speed import compute, is_slow, message_times, pairs_of

_STEP_SECONDS = 20.0
_PAIR_SECONDS = 60.0
_COMPUTE_SECONDS = 40.0
_AT_ONCE = 32


@dataclass(frozen=True)
class Request:
    """What to look at.

    Attributes:
        frameworks: of "torch" and "tf".
        run_dir: the run directory.
        speed: whether to measure speed, too.
        seconds: what a host has to gather its facts.
    """

    frameworks: tuple[str, ...]
    run_dir: str
    speed: bool
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Give it in JSON's types."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Request":
        """Make one of what :meth:`as_dict` gave."""
        return cls(**{**values, "frameworks": tuple(values["frameworks"])})


@dataclass(frozen=True)
class Member:
    """A process of the examination.

    Attributes:
        name: its host, as the launcher calls it; empty where it has to say so itself.
        slots: workers on its host.
        leads: whether it speaks for its host.
    """

    name: str
    slots: int
    leads: bool


def gather(request: Request, member: Member) -> dict[str, Any]:
    """Gather what a host is and has; milliseconds but for loading the frameworks. Local."""
    identity = {"name": member.name, "slots": member.slots, "leads": member.leads, "process": os.getpid()}
    if not member.leads:
        return identity
    software = software_facts(request.frameworks, request.seconds)
    return {**identity, "software": software, **machine_facts(Path(request.run_dir))}


def examine(exchange: Exchange, request: Request, facts: dict[str, Any]) -> list[int]:
    """Collective. Do all steps; what was found is in the exchange's record.

    Args:
        exchange: between the members.
        request: what to look at.
        facts: of this member.

    Returns:
        The members that lead their hosts.
    """
    everyone = exchange.share("facts", facts, request.seconds + _STEP_SECONDS)
    leaders = [index for index, its in enumerate(everyone) if its and its["leads"]]
    leads = exchange.index in leaders
    _look_for_shared_directory(exchange, leaders, request)
    listeners = Listeners(facts["interfaces"] if leads and len(leaders) > 1 else {})
    try:
        places = exchange.share("places", listeners.places, _STEP_SECONDS)
        others = [index for index in leaders if index != exchange.index and places[index]]
        links = _connect({index: places[index] for index in others}) if leads else {}
        all_links = exchange.share("links", links, _STEP_SECONDS)
        if request.speed:
            _measure_computing(exchange, leads)
            _measure_pairs(exchange, leaders, places, all_links)
    finally:
        listeners.close()
    return leaders


def _connect(places: dict[int, dict[str, list[Any]]]) -> dict[str, dict[str, Any]]:
    """Try all listeners of the other hosts; give how it went by member and interface."""
    tried = [(index, name, place) for index, of_host in places.items() for name, place in of_host.items()]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = list(pool.map(lambda one: connect(one[2]), tried))
    links: dict[str, dict[str, Any]] = {str(index): {} for index in places}
    for (index, name, _), result in zip(tried, results, strict=True):
        links[str(index)][name] = result
    return links


def _look_for_shared_directory(exchange: Exchange, leaders: list[int], request: Request) -> None:
    """Collective. Let the first host make a file in the run directory; who sees it is recorded."""
    place = existing(Path(request.run_dir))
    mark: Path | None = place / f".hvdtrain-doctor-{secrets.token_hex(8)}"
    first = bool(leaders) and exchange.index == leaders[0]
    try:
        if first and mark:
            mark.touch(mode=0o600)
    except OSError:
        mark = None
    try:
        marks = exchange.share("mark", str(mark) if first and mark else None, _STEP_SECONDS)
        wanted = marks[leaders[0]] if leaders else None
        exchange.share("seen", bool(wanted) and _is_listed(Path(str(wanted))), _STEP_SECONDS)
    finally:
        if first and mark:
            mark.unlink(missing_ok=True)


def _is_listed(file: Path) -> bool:
    """Whether a folder lists a file: of the file itself, a network file system may remember other."""
    try:
        return file.name in os.listdir(file.parent)
    except OSError:
        return False


def _measure_computing(exchange: Exchange, leads: bool) -> None:
    """Collective. All hosts compute at once; a second time where one looks slow."""
    results = exchange.share("compute", compute() if leads else None, _COMPUTE_SECONDS)
    if is_slow(results):
        exchange.share("compute again", compute() if leads else None, _COMPUTE_SECONDS)


def _measure_pairs(exchange: Exchange, leaders: list[int], places: list[Any], links: list[Any]) -> None:
    """Collective. Measure one pair after the other, so that none disturbs another."""
    for first, second in pairs_of(leaders):
        working = [
            places[second][name]
            for name, link in ((links[first] or {}).get(str(second)) or {}).items()
            if not link["error"]
        ]
        result: dict[str, Any] | None = None
        if working and exchange.index in (first, second):
            result = exchange.time_messages(first, second)
            if exchange.index == first and result is None:
                result = _time_messages(working[0])
        exchange.share(f"pair {first} {second}", result, _PAIR_SECONDS)


def _time_messages(place: list[Any]) -> dict[str, Any]:
    try:
        with conversation(place) as talk:
            return {**message_times(talk.send), "used": "TCP"}
    except OSError as error:
        return {"error": str(error)}
