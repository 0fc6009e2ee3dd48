"""What the driver of an elastic job and its workers tell each other: lines of JSON.

Every message is one line. Messages of a world have its generation, so that what comes too late is dropped.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hvdtrain.workers.world import Place, World

MAX_LINE_BYTES = 1 << 18
MAX_TEXT = 1 << 16


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Text = Annotated[str, Field(max_length=MAX_TEXT)]


# from a worker to the driver


class Hello(_Message):
    """The first message of a worker."""

    kind: Literal["hello"] = "hello"
    host: Text  # the name of its host, as its slot or its launcher calls it
    # distinguishes its host, and the numbering of processes there, from others of the same name
    machine: Text = ""
    pid: int  # its process
    process_seconds: float  # when its process started, as the system counts it


class Beat(_Message):
    """Once a second: what the worker's training thread does, as ``read_state`` takes it."""

    kind: Literal["beat"] = "beat"
    state: list[Any]


class Ready(_Message):
    """The worker is in no world and its training thread waits for the next one."""

    kind: Literal["ready"] = "ready"
    generation: int  # the world that it left, 0 if it was in none
    place: Place  # its place in the training
    valid: bool  # whether its state is whole: it may be rank 0
    digest: Text  # of what must be equal on all workers (config, versions, data, shapes)
    stall_timeout: float  # the longest time without an answer or progress, in seconds; 0 for no limit


class Values(_Message):
    """A part of what the digest is of, on request: name to value, as text."""

    kind: Literal["values"] = "values"
    part: int
    of: int
    values: dict[str, Text]


class Formed(_Message):
    """Horovod is up in this world."""

    kind: Literal["formed"] = "formed"
    generation: int


class FormFailed(_Message):
    """Horovod did not come up in this world."""

    kind: Literal["form_failed"] = "form_failed"
    generation: int
    reason: Text


class Synced(_Message):
    """The worker has the whole state of this world, and trains."""

    kind: Literal["synced"] = "synced"
    generation: int  # the world
    place: Place  # its place in the training
    run_dir: Text = ""  # the run directory


class Leaving(_Message):
    """The worker wants to leave at the next step boundary, such as after SIGTERM."""

    kind: Literal["leaving"] = "leaving"
    why: Text


class LeftWorld(_Message):
    """The worker has left the job in order, and ends."""

    kind: Literal["left"] = "left"


class Failed(_Message):
    """The worker ends because of an error."""

    kind: Literal["failed"] = "failed"
    # whose error it is. "code": the same would happen again, and ends the job. "environment": of this worker
    # or its host; the others continue without it. "peer": another worker was lost
    blame: Literal["code", "environment", "peer"]
    problem: Text  # what was found
    remedy: Text = ""  # what to do
    exit_code: int  # the exit code that the error has


class Done(_Message):
    """Training is complete, or stopped with its state saved (75)."""

    kind: Literal["done"] = "done"
    exit_code: int


class Stack(_Message):
    """The Python stacks of the worker, on request."""

    kind: Literal["stack"] = "stack"
    text: Text


# from the driver to a worker


class Welcome(_Message):
    """The answer to ``Hello``."""

    kind: Literal["welcome"] = "welcome"
    worker: Text  # the name of this worker
    job: Text  # the name of the job: what a run directory's lock carries
    slot: int  # its number among the slots of its host
    slots_on_host: int  # slots of this host
    least: int  # with fewer workers the job waits
    most: int  # the most workers that the job may have
    is_training: bool  # whether the job trains already, so that this worker joins it
    lease_seconds: float  # so long the worker may write files, and continues, without a message of the driver


class DriverBeat(_Message):
    """Once a second: the driver is there; it renews the lease."""

    kind: Literal["driver_beat"] = "driver_beat"


class ChangeWorld(_Message):
    """Leave this world at the next step boundary."""

    kind: Literal["change"] = "change"
    generation: int
    why: Text


class Abort(_Message):
    """Give up the collectives of this world now: it is broken."""

    kind: Literal["abort"] = "abort"
    generation: int
    why: Text


class EnterWorld(_Message):
    """Enter this world."""

    kind: Literal["world"] = "world"
    world: World


class Retry(_Message):
    """The world could not be formed: say ``Ready`` again."""

    kind: Literal["retry"] = "retry"
    generation: int


class Stop(_Message):
    """All save and stop; the job ends with 75. ``why`` says what happened, as text."""

    kind: Literal["stop"] = "stop"
    signal: int
    why: Text = ""


class End(_Message):
    """The job ends with an error; ``speaks`` says whether this worker reports it."""

    kind: Literal["end"] = "end"
    problem: Text
    remedy: Text = ""
    exit_code: int
    speaks: bool = False


class Leave(_Message):
    """End in order: the next world is without this worker."""

    kind: Literal["leave"] = "leave"
    why: Text


class Refuse(_Message):
    """The job does not take this worker."""

    kind: Literal["refuse"] = "refuse"
    problem: Text
    remedy: Text = ""


class KillProcess(_Message):
    """Kill a process of this host, which is stopped, if it started at this time."""

    kind: Literal["kill"] = "kill"
    pid: int
    process_seconds: float


class AskValues(_Message):
    """Send ``Values``."""

    kind: Literal["values?"] = "values?"


class AskStack(_Message):
    """Send ``Stack``."""

    kind: Literal["stack?"] = "stack?"


FromWorker = (
    Hello | Beat | Ready | Values | Formed | FormFailed | Synced | Leaving | LeftWorld | Failed | Done | Stack
)
FromDriver = (
    Welcome
    | DriverBeat
    | ChangeWorld
    | Abort
    | EnterWorld
    | Retry
    | Stop
    | End
    | Leave
    | Refuse
    | KillProcess
    | AskValues
    | AskStack
)
_FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="kind")])
_FROM_DRIVER: TypeAdapter[FromDriver] = TypeAdapter(Annotated[FromDriver, Field(discriminator="kind")])


def encode(message: FromWorker | FromDriver) -> bytes:
    """Return a message as a line."""
    return message.model_dump_json().encode() + b"\n"


def from_worker(line: bytes) -> FromWorker | None:
    """Return the message of a worker that a line holds; None if it holds none."""
    try:
        return _FROM_WORKER.validate_json(line)
    except ValidationError:
        return None


def from_driver(line: bytes) -> FromDriver | None:
    """Return the message of the driver that a line holds; None if it holds none."""
    try:
        return _FROM_DRIVER.validate_json(line)
    except ValidationError:
        return None
