"""What the driver of an elastic job and its workers tell each other: lines with a name and JSON.

Messages of a world have its generation, so that what comes too late is dropped.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, ValidationError

from hvdtrain.workers.world import Frozen, TrainingPosition, World

MAX_LINE_BYTES = 1 << 25  # a worker's values are one line
MAX_TEXT = 1 << 16


Text = Annotated[str, Field(max_length=MAX_TEXT)]
_M = TypeVar("_M", bound=Frozen)


# from a worker to the driver


class Hello(Frozen):
    """The first message of a worker."""

    host: Text  # the name of its host, as its slot or its launcher calls it
    # distinguishes its host, and the numbering of processes there, from others of the same name
    machine: Text = ""
    pid: int  # its process
    process_seconds: float  # when its process started, as the system counts it


class Beat(Frozen):
    """Once a second: what the worker's training thread does, as ``read_state`` takes it."""

    state: list[Any]


class Ready(Frozen):
    """The worker is in no world and its training thread waits for the next one."""

    generation: int  # the world that it left, 0 if it was in none
    place: TrainingPosition  # its place in the training
    valid: bool  # whether its state is whole: it may be rank 0
    digest: Text  # of what must be equal on all workers (config, versions, data, shapes)
    stall_timeout: float  # the longest time without an answer or progress, in seconds; 0 for no limit
    values: dict[str, Text] = Field({})  # what the digest is of, as text by name; empty if sent before


class Formed(Frozen):
    """Horovod is up in this world."""

    generation: int


class FormFailed(Frozen):
    """Horovod did not come up in this world."""

    generation: int
    reason: Text


class Synced(Frozen):
    """The worker has the whole state of this world, and trains."""

    generation: int  # the world
    place: TrainingPosition  # its place in the training
    run_dir: Text = ""  # the run directory


class Leaving(Frozen):
    """The worker wants to leave at the next step boundary, such as after SIGTERM."""

    why: Text


class LeftWorld(Frozen):
    """The worker has left the job in order, and ends."""


class Failed(Frozen):
    """The worker ends because of an error."""

    # whose error it is. "code": the same would happen again, and ends the job. "environment": of this worker
    # or its host; the others continue without it. "peer": another worker was lost
    blame: Literal["code", "environment", "peer"]
    problem: Text  # what was found
    remedy: Text = ""  # what to do
    exit_code: int  # the exit code that the error has


class Done(Frozen):
    """Training is complete, or stopped with its state saved (75)."""

    exit_code: int


# from the driver to a worker


class Welcome(Frozen):
    """The answer to ``Hello``."""

    worker: Text  # the name of this worker
    job: Text  # the name of the job: what a run directory's lock carries
    slot: int  # its number among the slots of its host
    slots_on_host: int  # slots of its host
    least: int  # with fewer workers the job waits
    most: int  # the most workers that the job may have
    is_training: bool  # whether the job trains already, so that this worker joins it
    lease_seconds: float  # so long the worker may write files, and continues, without a message of the driver


class DriverBeat(Frozen):
    """Once a second: the driver is there; it renews the lease."""


class ChangeWorld(Frozen):
    """Leave this world at the next step boundary."""

    generation: int
    why: Text


class Abort(Frozen):
    """Give up the collectives of this world now: it is broken."""

    generation: int
    why: Text
    again: bool = False  # whether to say ``Ready`` again if that is already said


class EnterWorld(Frozen):
    """Enter this world."""

    world: World


class Stop(Frozen):
    """All save and stop; the job ends with 75. ``why`` says what happened, as text."""

    signal: int
    why: Text = ""


class End(Frozen):
    """The job ends with an error; ``speaks`` says whether this worker reports it."""

    problem: Text
    remedy: Text = ""
    exit_code: int
    speaks: bool = False


class Leave(Frozen):
    """End in order: the next world is without this worker."""

    why: Text


class Refuse(Frozen):
    """The job does not take this worker."""

    problem: Text
    remedy: Text = ""


class KillProcess(Frozen):
    """Kill a process of this host, which is stopped, if it started at this time."""

    pid: int
    process_seconds: float


FromWorker = Hello | Beat | Ready | Formed | FormFailed | Synced | Leaving | LeftWorld | Failed | Done
_Order = ChangeWorld | Abort | EnterWorld | Stop | End | Leave | Refuse | KillProcess
FromDriver = Welcome | DriverBeat | _Order
_FROM_WORKER: dict[bytes, type[FromWorker]] = {one.__name__.encode(): one for one in get_args(FromWorker)}
_FROM_DRIVER: dict[bytes, type[FromDriver]] = {one.__name__.encode(): one for one in get_args(FromDriver)}


def encode(message: FromWorker | FromDriver) -> bytes:
    """Return a message as a line."""
    return f"{type(message).__name__} {message.model_dump_json()}\n".encode()


def from_worker(line: bytes) -> FromWorker | None:
    """Return the message of a worker that a line holds; None if it holds none."""
    return _decoded(line, _FROM_WORKER)


def from_driver(line: bytes) -> FromDriver | None:
    """Return the message of the driver that a line holds; None if it holds none."""
    return _decoded(line, _FROM_DRIVER)


def _decoded(line: bytes, kinds: Mapping[bytes, type[_M]]) -> _M | None:
    name, _, fields = line.partition(b" ")
    try:
        return kinds[name].model_validate_json(fields)
    except (KeyError, ValidationError):
        return None
