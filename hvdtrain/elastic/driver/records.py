"""Values of an elastic job: its slots and limits, what happens to its driver, and what it does about it."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.elastic.messages import FromDriver, FromWorker, Hello
from hvdtrain.elastic.watch.liveness import silence_seconds
from hvdtrain.errors import UsageError
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.host.start_reports import start_limit
from hvdtrain.storage.text import printable
from hvdtrain.workers.world import World

MOST_WORKERS = 256
SSH_FAILED, COMMAND_NOT_FOUND, NOT_EXECUTABLE = 255, 127, 126  # exit codes of ssh and of a shell
_ELASTIC_TIMEOUT_VARIABLE = "HOROVOD_ELASTIC_TIMEOUT"
_MOST_COOLDOWN_SECONDS = 3600
_NO_LIMIT_SECONDS = 604_800  # a week


def say(text: str) -> None:
    """Tell the user something, on standard error."""
    print(f"horovodrun: {printable(text)}".replace("\n", "\n  "), file=sys.stderr, flush=True)


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


def make_limits(
    wanted: int,
    slots: int,
    *,
    is_fixed: bool,
    least: int | None = None,
    most: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    cooldown: tuple[float, float] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Limits:
    """Return the limits of a job from the options that the user gave; None is for what was not given."""
    least = wanted if least is None else least
    if most is None:
        most = wanted if is_fixed else max(wanted, min(slots, MOST_WORKERS))
    _check_workers(wanted, least, most)
    problem = f"-np {wanted}: the hosts have {slots} slots"
    _check(slots >= wanted or not is_fixed, problem, "Give more hosts or slots, or a smaller -np.")
    shortest, longest = cooldown or Limits.cooldown_seconds
    problem = (
        f"--blacklist-cooldown-range {shortest:g} {longest:g}: the shortest and the longest number of "
        f"seconds are expected, between 1 and {_MOST_COOLDOWN_SECONDS}"
    )
    _check(1 <= shortest <= longest <= _MOST_COOLDOWN_SECONDS, problem)
    problem = f"--reset-limit {reset_limit}: a number, 0 or more, is expected"
    _check(reset_limit is None or reset_limit >= 0, problem)
    elastic_option = "--elastic-timeout"
    if elastic_timeout is None:
        elastic_option, text = _ELASTIC_TIMEOUT_VARIABLE, environ.get(_ELASTIC_TIMEOUT_VARIABLE, "")
        try:
            elastic_timeout = float(text or Limits.elastic_timeout)
        except ValueError:
            raise UsageError(f"{elastic_option}={text}: a number of seconds is expected") from None
    start_timeout = start_limit(environ) if start_timeout is None else start_timeout
    for option, seconds in (("--start-timeout", start_timeout), (elastic_option, elastic_timeout)):
        problem = f"{option} {seconds:g}: a number of seconds, greater than 0, is expected"
        _check(0 < seconds < float("inf"), problem)
    silence = float(silence_seconds(environ) or _NO_LIMIT_SECONDS)
    cooldown_seconds = (float(shortest), float(longest))
    return Limits(wanted, least, most, start_timeout, elastic_timeout, silence, reset_limit, cooldown_seconds)


def _check_workers(wanted: int, least: int, most: int) -> None:
    for option, value in (("-np", wanted), ("--min-np", least), ("--max-np", most)):
        _check(value >= 1, f"{option} {value}: a number of workers, 1 or more, is expected")
        problem = f"{option} {value}: an elastic job has at most {MOST_WORKERS} workers"
        remedy = "Start a larger job with a fixed number of workers, without --min-np."
        _check(value <= MOST_WORKERS, problem, remedy)
    starts = f"-np {wanted}, with which the job starts"
    _check(least <= wanted, f"--min-np {least} is greater than {starts}", f"Give --min-np {wanted} or less.")
    _check(most >= wanted, f"--max-np {most} is smaller than {starts}", f"Give --max-np {wanted} or more.")


def _check(is_right: bool, problem: str, remedy: str = "") -> None:
    if not is_right:
        raise UsageError(problem, remedy)


# for the workers to end by themselves when the job is over: rank 0 may wait for what it sends to trackers
END_SECONDS = 25.0


class Arrived(NamedTuple):
    """A worker has connected, proved that it knows the key, and said ``Hello``."""

    worker: str
    hello: Hello


class Heard(NamedTuple):
    """A worker has sent a message."""

    worker: str
    message: FromWorker


class Lost(NamedTuple):
    """The connection of a worker has ended."""

    worker: str  # whose
    # whether its host stopped to respond, so that nothing says that the process is gone
    is_unreachable: bool = False


class Exited(NamedTuple):
    """The process of a worker has ended; the code of a signal is negative."""

    worker: str
    code: int


class Discovered(NamedTuple):
    """These hosts are there now."""

    hosts: tuple[HostSlots, ...]


class Signalled(NamedTuple):
    """The launcher got a signal that ends the job."""

    number: int


class StoreFailed(NamedTuple):
    """The store of a world could not be opened."""

    reason: str


class Tick(NamedTuple):
    """Time has passed."""

    slept_seconds: float = 0.0  # in which the driver itself did not run: nobody is blamed for them


Event = Arrived | Heard | Lost | Exited | Discovered | Signalled | StoreFailed | Tick


class Start(NamedTuple):
    """Start a worker in a slot."""

    worker: str
    slot: Slot


class Send(NamedTuple):
    """Send a message to a worker."""

    worker: str
    message: FromDriver


class Kill(NamedTuple):
    """End the process of a worker for certain, by all means that there are."""

    worker: str


class Forward(NamedTuple):
    """Send a signal to the process of a worker."""

    worker: str
    number: int


class OpenWorld(NamedTuple):
    """Open a store with a new key and salt, and let all members of a world enter it."""

    # the world as each member is notified of it, in the order of ranks, without store and salt
    worlds: tuple[World, ...]


class CloseStore(NamedTuple):
    """Close the store of the current world."""


class Say(NamedTuple):
    """Tell the user."""

    text: str


class Finish(NamedTuple):
    """The job is over: end all workers, and return an exit code."""

    exit_code: int  # the job's
    problem: str = ""  # what was found; empty if it needs no words, or if a worker says it
    remedy: str = ""  # what to do
    grace_seconds: float = END_SECONDS  # so long the workers may take to end by themselves


Action = Start | Send | Kill | Forward | OpenWorld | CloseStore | Say | Finish
