"""What the driver of an elastic job needs of a cluster: slots, processes in them, a store for each world."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hvdtrain.elastic.watch.liveness import silence_seconds
from hvdtrain.errors import UsageError
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.host.start_reports import start_limit
from hvdtrain.storage.text import printable


def say(name: str, text: str) -> None:
    """Tell the user something, on standard error.

    Args:
        name: of the launcher, which comes first.
        text: one or several lines.
    """
    print(f"{name}: {printable(text)}".replace("\n", "\n  "), file=sys.stderr, flush=True)


class Slot(NamedTuple):
    """A place for one worker."""

    host: str  # the name of its host
    number: int  # its number on the host, from 0; it chooses the GPU

    def __str__(self) -> str:
        """Return host and number, such as "h2, slot 1"."""
        return f"{self.host}, slot {self.number}"


@dataclass(frozen=True)
class Limits:
    """What an elastic job may have, and how long its driver waits for what."""

    wanted: int  # workers to start with
    least: int  # with fewer workers training waits, and ends after ``elastic_timeout``
    most: int  # workers that are never exceeded
    start_timeout: float = 60.0  # how long the job waits for the first ``wanted`` workers, in seconds
    elastic_timeout: float = 600.0  # how long it waits while there are fewer than ``least``, in seconds
    silence_seconds: float = 20.0  # how long a host, or the driver, may be silent: the lease of a worker
    reset_limit: int | None = None  # how many worlds may break; None for any number
    # the shortest and the longest time for which a slot that failed is left out
    cooldown_seconds: tuple[float, float] = (5.0, 300.0)


class Process(Protocol):
    """A worker's process, on whatever host, as it was started."""

    def signal(self, number: int) -> None:
        """Send a signal to the worker. It does not wait."""
        ...

    def kill(self) -> None:
        """Kill the worker, and what started it here. It does not wait."""
        ...


class Store(Protocol):
    """The rendezvous of one world.

    Attributes:
        port: where it listens.
    """

    port: int

    def close(self) -> None:
        """Stop to listen, and end all connections."""
        ...


class Cluster(Protocol):
    """Where the workers of an elastic job run. None of its methods waits.

    Attributes:
        can_start: whether the driver starts workers; otherwise, such as below srun, they come by themselves.
        addresses: where the driver listens, each address and port; the driver sets it before the first start.
            Workers receive it in ``HVDTRAIN_ELASTIC``.
        listen_on: the addresses of this host at which the workers reach it; the driver listens on them only.
    """

    can_start: bool
    addresses: Sequence[tuple[str, int]]
    listen_on: Sequence[str]

    def hosts(self) -> Sequence[HostSlots]:
        """Return the hosts that there are now, in a fixed order, as far as is known."""
        ...

    def start(self, worker: str, slot: Slot, on_exit: Callable[[int], None]) -> Process:
        """Start a worker.

        Args:
            worker: the name of its process, which it receives.
            slot: where.
            on_exit: called in another thread with the exit code; that of a signal is negative.
        """
        ...

    def kill_far(self, host: str, pid: int, process_seconds: float) -> None:
        """Kill a process of another host if it can be reached, unless its number is another process's now."""
        ...

    def open_store(self, key: str, size: int) -> Store:
        """Open the rendezvous of a world.

        Args:
            key: the world's key.
            size: number of its workers.
        """
        ...

    def address_for(self, host: str) -> str:
        """Return the address under which a host reaches this one."""
        ...

    def say(self, text: str) -> None:
        """Tell the user, on the launcher's output."""
        ...


MOST_WORKERS = 256
_ELASTIC_TIMEOUT_VARIABLE = "HOROVOD_ELASTIC_TIMEOUT"
_ELASTIC_TIMEOUT_SECONDS = 600.0
_COOLDOWN_SECONDS = (5.0, 300.0)
_MOST_COOLDOWN_SECONDS = 3600
_NO_LIMIT_SECONDS = 604_800  # a week


@dataclass(frozen=True)
class LimitOptions:
    """What a user gave of the limits of an elastic job; None for what was not given."""

    wanted: int  # -np
    least: int | None = None  # --min-np
    most: int | None = None  # --max-np
    start_timeout: float | None = None  # --start-timeout, in seconds
    elastic_timeout: float | None = None  # --elastic-timeout, in seconds
    reset_limit: int | None = None  # --reset-limit
    cooldown: tuple[float, float] | None = None  # --blacklist-cooldown-range, in seconds


def make_limits(
    given: LimitOptions, slots: int, environ: Mapping[str, str], *, is_fixed: bool, can_start: bool = True
) -> Limits:
    """Return the limits of a job.

    Args:
        given: what the user gave.
        slots: the slots that there are now; 0 if that is not known.
        environ: the environment, which may have some of the times.
        is_fixed: whether the slots never become more, so that by default the job does not, either.
        can_start: whether the driver starts the workers.

    Raises:
        UsageError: If the numbers contradict each other or are out of range.
    """
    wanted = given.wanted
    least = wanted if given.least is None else given.least
    found = wanted if is_fixed else max(wanted, min(slots, MOST_WORKERS))
    most = found if given.most is None else given.most
    _check_workers(wanted, least, most)
    if is_fixed and can_start and slots < wanted:
        raise UsageError(
            f"-np {wanted}: the hosts have {slots} slots", "Give more hosts or slots, or a smaller -np."
        )
    cooldown = _COOLDOWN_SECONDS if given.cooldown is None else given.cooldown
    if not 1 <= cooldown[0] <= cooldown[1] <= _MOST_COOLDOWN_SECONDS:
        raise UsageError(
            f"--blacklist-cooldown-range {cooldown[0]:g} {cooldown[1]:g}: the shortest and the longest "
            f"number of seconds are expected, between 1 and {_MOST_COOLDOWN_SECONDS}"
        )
    if given.reset_limit is not None and given.reset_limit < 0:
        raise UsageError(f"--reset-limit {given.reset_limit}: a number, 0 or more, is expected")
    silence = silence_seconds(environ)
    return Limits(
        wanted=wanted,
        least=least,
        most=most,
        start_timeout=_start_timeout(given.start_timeout, environ),
        elastic_timeout=_elastic_timeout(given.elastic_timeout, environ),
        silence_seconds=float(silence or _NO_LIMIT_SECONDS),
        reset_limit=given.reset_limit,
        cooldown_seconds=(float(cooldown[0]), float(cooldown[1])),
    )


def _check_workers(wanted: int, least: int, most: int) -> None:
    for option, value in (("-np", wanted), ("--min-np", least), ("--max-np", most)):
        if value < 1:
            raise UsageError(f"{option} {value}: a number of workers, 1 or more, is expected")
        if value > MOST_WORKERS:
            raise UsageError(
                f"{option} {value}: an elastic job has at most {MOST_WORKERS} workers",
                "Start a larger job with a fixed number of workers, without --min-np.",
            )
    if least > wanted:
        raise UsageError(
            f"--min-np {least} is greater than -np {wanted}, with which the job starts",
            f"Give --min-np {wanted} or less.",
        )
    if most < wanted:
        raise UsageError(
            f"--max-np {most} is smaller than -np {wanted}, with which the job starts",
            f"Give --max-np {wanted} or more.",
        )


def _start_timeout(given: float | None, environ: Mapping[str, str]) -> float:
    if given is None:
        return start_limit(environ)
    return _seconds("--start-timeout", given)


def _elastic_timeout(given: float | None, environ: Mapping[str, str]) -> float:
    if given is not None:
        return _seconds("--elastic-timeout", given)
    text = environ.get(_ELASTIC_TIMEOUT_VARIABLE, "")
    try:
        return _seconds(_ELASTIC_TIMEOUT_VARIABLE, float(text)) if text else _ELASTIC_TIMEOUT_SECONDS
    except ValueError:
        raise UsageError(f"{_ELASTIC_TIMEOUT_VARIABLE}={text}: a number of seconds is expected") from None


def _seconds(option: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UsageError(f"{option} {value:g}: a number of seconds, greater than 0, is expected")
    return value


def workers_of_slurm(environ: Mapping[str, str]) -> int | None:
    """Return the number of tasks that Slurm's allocation is for; None if it does not say."""
    value = environ.get("SLURM_NTASKS", "")
    return int(value) if value.isdecimal() and int(value) > 0 else None
