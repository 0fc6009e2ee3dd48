"""What one worker recorded, and the file that it is handed to rank 0 in."""

import gzip
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.backends.recording import Busy, Operation, Operations
from hvdtrain.storage.files import read_regular
from hvdtrain.tools.profile.clocks import ClockOffset
from hvdtrain.workers.activity import TRAINING, Activity

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
