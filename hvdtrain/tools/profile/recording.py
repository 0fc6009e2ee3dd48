"""What one worker recorded, and how far the clock of its host is from that of rank 0's host."""

import gzip
import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.backends.recording import Busy, Operation, Operations
from hvdtrain.workers.activity import TRAINING, Activity
from hvdtrain.workers.agreement import Workers

_ROUNDS = 24
_LATE_SECONDS = (0.002, 0.006)  # a few of Horovod's cycles, at another place in a cycle each time
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ClockOffset(NamedTuple):
    """How far a worker's clock is from that of rank 0."""

    offset_ns: int = 0  # what is taken off this worker's times
    uncertainty_ns: int = 0  # how far from the truth that is at most

    def joined(self, later: "ClockOffset") -> "ClockOffset":
        """Return the offset between two measurements: their mean, which is that uncertain if it changed."""
        apart = abs(later.offset_ns - self.offset_ns) // 2
        return ClockOffset(
            (self.offset_ns + later.offset_ns) // 2, apart + max(self.uncertainty_ns, later.uncertainty_ns)
        )


def clock_id() -> str:
    """Return what distinguishes this host's clock from others; containers of one host share it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def measure_offset(workers: Workers, clock: str, now_ns: Callable[[], int] = time.time_ns) -> ClockOffset:
    """Collective. Return how far this worker's clock is from that of rank 0.

    Nobody leaves a barrier before all have entered it. So what a worker's clock says when it leaves is later
    than what rank 0's said when it entered, and the other way round: each round bounds the difference from
    both sides. The bounds are close if one of the two comes late, because the others then leave soon after;
    rank 0 and the other ranks take turns in that.
    """
    clocks = workers.allgather_object(clock)
    if len(set(clocks)) == 1:
        return ClockOffset()
    own: list[tuple[int, int]] = []  # when this worker entered and left some barriers
    for number in range(_ROUNDS):
        if (workers.rank == 0) == (number % 2 == 0):
            time.sleep(random.Random(number).uniform(*_LATE_SECONDS))
        entered_ns = now_ns()
        workers.barrier()
        own.append((entered_ns, now_ns()))
    gathered = workers.allgather_object(own)
    if clock == clocks[0]:
        return ClockOffset()
    others = [rounds for of, rounds in zip(clocks, gathered, strict=True) if of == clock]
    pairs = [pair for rounds in others for pair in zip(gathered[0], rounds, strict=True)]
    most = min(left - root_entered for (root_entered, _), (_, left) in pairs)
    least = max(entered - root_left for (_, root_left), (entered, _) in pairs)
    return ClockOffset((most + least) // 2, abs(most - least) // 2)


class Phase(NamedTuple):
    """What the training thread did for a time, by the worker's clock; the step is 0 if it belongs to none."""

    name: str
    step: int
    begin_ns: int
    end_ns: int


class StepMark(NamedTuple):
    """When a worker had computed the gradients of a step, and when the sums over workers had arrived."""

    step: int
    ready_ns: int
    reduced_ns: int


@dataclass
class Recording:
    """What one worker recorded, by its own clock; ``timeline`` has the events of Horovod's, on rank 0."""

    rank: int
    host: str
    begin_ns: int = 0
    end_ns: int = 0
    clock: ClockOffset = field(default_factory=ClockOffset)
    phases: list[Phase] = field(default_factory=list)
    marks: list[StepMark] = field(default_factory=list)
    operations: Operations = field(default_factory=Operations)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def seconds_of(self, name: str) -> float:
        """Return how long the training thread was in phases of a name."""
        return sum(phase.end_ns - phase.begin_ns for phase in self.phases if phase.name == name) / 1e9

    def common(self, at_ns: int) -> int:
        """Return a time of this worker by the clock of rank 0."""
        return at_ns - self.clock.offset_ns

    def cut_operations(self, most: int) -> None:
        """Keep what lies in the recording; of more operations than so many, the longest."""
        spans = [s for s in self.operations.spans if s.begin_ns < self.end_ns and s.end_ns > self.begin_ns]
        if left := max(0, len(spans) - most):
            self.problems.append(f"rank {self.rank}: the {left:,} shortest operations are left out")
            spans = sorted(spans, key=lambda span: span.begin_ns - span.end_ns)[:most]
            spans.sort(key=lambda span: span.begin_ns)
        self.operations.spans = spans

    def to_bytes(self) -> bytes:
        """Return the recording as it is sent to rank 0."""
        return gzip.compress(json.dumps(vars(self), default=vars).encode(), compresslevel=1)

    @classmethod
    def from_bytes(cls, content: bytes) -> "Recording":
        """Return the recording that was sent."""
        try:
            made = cls(**json.loads(gzip.decompress(content)))
            made.clock = ClockOffset(*made.clock)
            made.phases = [Phase(*phase) for phase in made.phases]
            made.marks = [StepMark(*mark) for mark in made.marks]
            sent = Operations(**vars(made)["operations"])
            made.operations = Operations(sent.threads, [Operation(*span) for span in sent.spans])
        except Exception as error:  # of gzip, zlib and json there are many; or memory is short
            raise ValueError(f"it holds no recording: {error!r}") from None
        return made


class Listener:
    """Notes what the training thread does, and the marks of its steps. Called with each new activity."""

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
        if name != TRAINING or step <= self._marked:
            return
        before, after = self._before[1], self._busy()
        if before is not None and after is not None and after.begun_seconds > before.begun_seconds:
            self._marked = step
            ready_ns = round(1e9 * (before.begun_seconds + after.busy_seconds))
            self._recording.marks.append(StepMark(step, ready_ns, round(1e9 * after.begun_seconds)))
