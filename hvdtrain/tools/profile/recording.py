"""What one worker recorded, and the file that it is handed to rank 0 in."""

import gzip
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.backends.recording import Busy, Operation, Operations
from hvdtrain.storage.files import read_regular
from hvdtrain.workers.activity import TRAINING, Activity
from hvdtrain.workers.agreement import Workers

_ROUNDS = 24
_CLOSE_NS = 500_000
_MOST_NS = 5_000_000_000
_LATE_SECONDS = (0.002, 0.006)  # a few of Horovod's cycles, at another place in a cycle each time
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Round = tuple[int, int]  # when a worker entered and left a barrier, by its own clock


class ClockOffset(NamedTuple):
    """How far a worker's clock is from that of rank 0.

    Attributes:
        offset_ns: what is taken off this worker's times.
        uncertainty_ns: how far from the truth that is at most.
        at_ns: when it was measured, by this worker's clock.
    """

    offset_ns: int = 0
    uncertainty_ns: int = 0
    at_ns: int = 0


def clock_id() -> str:
    """Return what tells this host's clock from others; containers of one host share it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def measure_offset(workers: Workers, clock: str, now_ns: Callable[[], int] = time.time_ns) -> ClockOffset:
    """Collective. Return how far this worker's clock is from that of rank 0.

    Nobody leaves a barrier before all have entered it. So what a worker's clock says when it leaves is later
    than what rank 0's said when it entered, and the other way round: each round bounds the difference from
    both sides. The bounds are close if one of the two comes late, because the others then leave soon after;
    rank 0 and the other ranks take turns in that. If cores are busy, more rounds follow, for some seconds.

    Args:
        workers: the workers.
        clock: what tells this worker's clock from others, as ``clock_id`` returns it.
        now_ns: returns this worker's time.
    """
    clocks = workers.allgather_object(clock)
    if len(set(clocks)) == 1:
        return ClockOffset(at_ns=now_ns())
    own: list[Round] = []
    while True:
        own += _rounds(workers, now_ns)
        gathered = [[(int(a), int(b)) for a, b in found] for found in workers.allgather_object(own)]
        offsets = {
            name: ClockOffset()
            if name == clocks[0]
            else offset_of(
                gathered[0], [found for of, found in zip(clocks, gathered, strict=True) if of == name]
            )
            for name in set(clocks)
        }
        # the same on all workers: it follows from what all of them have
        is_close = max(found.uncertainty_ns for found in offsets.values()) <= _CLOSE_NS
        if is_close or gathered[0][-1][1] - gathered[0][0][0] > _MOST_NS:
            return offsets[clock]._replace(at_ns=own[-1][1])


def _rounds(workers: Workers, now_ns: Callable[[], int]) -> Iterator[Round]:
    """Collective. Yield when this worker entered and left some barriers."""
    for number in range(_ROUNDS):
        if (workers.rank == 0) == (number % 2 == 0):
            time.sleep(random.Random(number).uniform(*_LATE_SECONDS))
        entered = now_ns()
        workers.barrier()
        yield entered, now_ns()


def offset_of(root: Sequence[Round], others: Sequence[Sequence[Round]]) -> ClockOffset:
    """Return how far a clock is from that of rank 0.

    Args:
        root: the rounds of rank 0.
        others: those of each worker with the other clock.
    """
    pairs = [pair for found in others for pair in zip(root, found, strict=True)]
    most = min(left - root_entered for (root_entered, _), (_, left) in pairs)
    least = max(entered - root_left for (_, root_left), (entered, _) in pairs)
    return ClockOffset((most + least) // 2, abs(most - least) // 2)


def to_common(at_ns: int, before: ClockOffset, after: ClockOffset) -> int:
    """Return a worker's time by the clock of rank 0.

    Args:
        at_ns: the time by the worker's clock.
        before: what was measured before the recording.
        after: what was measured after it; between the two, the offset is taken to change evenly.
    """
    length = after.at_ns - before.at_ns
    if length <= 0 or before.offset_ns == after.offset_ns:
        return at_ns - before.offset_ns
    part = min(1.0, max(0.0, (at_ns - before.at_ns) / length))
    return at_ns - before.offset_ns - round(part * (after.offset_ns - before.offset_ns))


MAX_FILE_BYTES = 1 << 30


class Phase(NamedTuple):
    """What the training thread did for a time.

    Attributes:
        name: an activity's name.
        step: its step; 0 if it belongs to none.
        begin_ns: when it began, by the worker's clock.
        end_ns: when it ended.
    """

    name: str
    step: int
    begin_ns: int
    end_ns: int


class StepMark(NamedTuple):
    """The places of a step where workers wait for one another.

    Attributes:
        step: the step.
        ready_ns: when this worker had computed its gradients, by its clock.
        reduced_ns: when the sums over workers had arrived.
    """

    step: int
    ready_ns: int
    reduced_ns: int


@dataclass
class Recording:
    """What one worker recorded.

    Attributes:
        rank: the worker.
        host: its host.
        token: what all workers of one recording have in common.
        begin_ns: when the recording began, by this worker's clock.
        end_ns: when it ended.
        before: how far its clock was from that of rank 0 before.
        after: the same after the recording.
        phases: what the training thread did.
        marks: the marks of the steps; none if they are not measured.
        operations: what the framework's profiler recorded.
        timeline: the events of Horovod's timeline, on rank 0.
        problems: what could not be recorded, in words.
    """

    rank: int
    host: str
    token: str
    begin_ns: int = 0
    end_ns: int = 0
    before: ClockOffset = field(default_factory=ClockOffset)
    after: ClockOffset = field(default_factory=ClockOffset)
    phases: list[Phase] = field(default_factory=list)
    marks: list[StepMark] = field(default_factory=list)
    operations: Operations = field(default_factory=Operations)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The steps that were recorded, in order."""
        return sorted({phase.step for phase in self.phases if phase.name == TRAINING})

    def cut_operations(self, most: int) -> None:
        """Keep what lies in the recording; of more operations than so many, the longest."""
        spans = [s for s in self.operations.spans if s.begin_ns < self.end_ns and s.end_ns > self.begin_ns]
        if left := max(0, len(spans) - most):
            self.problems.append(f"rank {self.rank}: the {left:,} shortest operations are left out")
            spans = sorted(spans, key=lambda span: span.begin_ns - span.end_ns)[:most]
            spans.sort(key=lambda span: span.begin_ns)
        self.operations.spans = spans

    def to_bytes(self) -> bytes:
        """Return the recording as the content of a file."""
        values = {**vars(self), "operations": vars(self.operations)}
        return gzip.compress(json.dumps(values).encode(), compresslevel=1)

    @classmethod
    def from_bytes(cls, content: bytes | bytearray) -> "Recording":
        """Return the recording that a file holds.

        Raises:
            ValueError: If it holds none, or cannot be unpacked.
        """
        try:
            values = json.loads(gzip.decompress(content))
            made = cls(**values)
            made.before, made.after = ClockOffset(*made.before), ClockOffset(*made.after)
            made.phases = [Phase(*phase) for phase in made.phases]
            made.marks = [StepMark(*mark) for mark in made.marks]
            operations = values["operations"]
            made.operations = Operations(
                operations["threads"], [Operation(*span) for span in operations["spans"]]
            )
        except Exception as error:  # of gzip, zlib and json there are many; or memory is short
            raise ValueError(f"it holds no recording: {error!r}") from None
        return made


def file_of(folder: Path, rank: int, token: str) -> Path:
    """Return the file that a worker hands its recording over in."""
    return folder / f"rank-{rank:04d}-{token}.json.gz"


def read_recording(path: Path, token: str) -> Recording | None:
    """Return a worker's recording; None if there is no such file, it is not whole or it cannot be read."""
    try:
        found = Recording.from_bytes(read_regular(path, MAX_FILE_BYTES))
    except Exception:
        return None
    return found if found.token == token else None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


class Listener:
    """Notes what the training thread does, and the marks of its steps. Called with each new activity.

    Args:
        recording: where it is noted.
        busy: returns what the step clock says.
    """

    def __init__(self, recording: Recording, busy: Callable[[], Busy | None]) -> None:
        self._recording, self._busy = recording, busy
        self._current: tuple[str, int, int] | None = None
        self._before: tuple[int, Busy | None] = 0, None  # the step that began last, and the clock then
        self._marked = 0  # the last step with a mark

    def __call__(self, activity: Activity) -> None:
        """Take a new activity."""
        self.close()
        if activity.name == TRAINING and activity.step != self._before[0]:
            self._before = activity.step, self._busy()
        self._current = activity.name, activity.step, time.time_ns()

    def close(self) -> None:
        """End the activity that lasts."""
        if self._current is None:
            return
        now_ns = time.time_ns()
        (name, step, begin_ns), self._current = self._current, None
        self._recording.phases.append(Phase(name, step, begin_ns, now_ns))
        if name == TRAINING and step > self._marked:
            self._mark(step)

    def _mark(self, step: int) -> None:
        before, after = self._before[1], self._busy()
        if before is None or after is None or after.begun_seconds <= before.begun_seconds:
            return
        self._marked = step
        ready_ns = round(1e9 * (before.begun_seconds + after.busy_seconds))
        self._recording.marks.append(StepMark(step, ready_ns, round(1e9 * after.begun_seconds)))
