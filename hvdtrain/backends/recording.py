"""Recording steps: what each framework's ``step_clock.py`` gives, and Horovod's timeline."""

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.workers.agreement import Workers


class StepClockBase:
    """Measures how long this worker is busy from one reduction to the next: reading, computing, callbacks.

    The time of a step travels with the next one, since that of a step ends when its gradients are sent.
    """

    def __init__(self, workers: Workers, is_measured: bool) -> None:
        self._workers = workers
        self._is_measured = is_measured and workers.may_reduce
        # how many ranks ``numbers`` speaks of: the most that the job may have, so that the vector of a step
        # keeps its length when workers come and go
        self.timed = workers.most if self._is_measured else 0
        self._is_waiting = False


_TIMELINE, _DYNAMIC = "HOROVOD_TIMELINE", "DYNAMIC"

OPERATION, KERNEL, RUNTIME = "operation", "kernel", "runtime"


class Operation(NamedTuple):
    """A span that a framework's profiler recorded."""

    thread: int  # the thread, or the stream of a device, by its place in ``Operations.threads``
    name: str  # what it did
    begin_ns: int  # when it began, in nanoseconds since the epoch by this host's clock
    end_ns: int  # when it ended
    # ``OPERATION`` for one of the framework's operations on the host, ``KERNEL`` for work of a device,
    # ``RUNTIME`` for what calls or waits for them
    kind: str


@dataclass
class Operations:
    """What a framework's profiler recorded."""

    threads: list[str] = field(default_factory=list)  # names of threads and streams
    spans: list[Operation] = field(default_factory=list)  # the spans, in the order of their beginnings


class Busy(NamedTuple):
    """What a worker's step clock says between two steps."""

    # when the time of the next step began, in seconds since the epoch: when the sums over workers had
    # arrived, or the clock was restarted
    begun_seconds: float
    # how long the worker was busy with its own part of the last step, until it was ready to reduce its
    # gradients
    busy_seconds: float


@contextmanager
def timeline_requested(is_requested: bool) -> Iterator[None]:
    """Return a context in which ``hvd.init()`` prepares for a timeline, unless the user has it record one."""
    if not is_requested or _TIMELINE in os.environ:
        yield
        return
    os.environ[_TIMELINE] = _DYNAMIC
    try:
        yield
    finally:
        os.environ.pop(_TIMELINE, None)


def check_size(size: int, most: int, unit: str) -> None:
    """Check that what a profiler recorded can be read without taking memory that the training needs."""
    if size > most:
        raise ValueError(f"it has {size:,} {unit}, at most {most:,} are read: record fewer steps")


class HorovodTimeline:
    """Horovod's timeline of some steps, which rank 0 writes into a temporary file."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Begin to record."""
        if (given := os.environ.get(_TIMELINE, "")) != _DYNAMIC:
            raise RuntimeError(f"{_TIMELINE} is {given!r}: Horovod puts the timeline of the whole job there")
        folder = tempfile.TemporaryDirectory(prefix="hvdtrain-timeline-", ignore_cleanup_errors=True)
        try:
            self._hvd.start_timeline(str(Path(folder.name) / "timeline.json"))
        except ValueError as error:
            folder.cleanup()
            raise RuntimeError(
                "Horovod was started without a timeline, by an earlier training of this process or by its "
                "script: of the trainings of a process, the first one must have the profile"
            ) from error
        self._folder = folder

    def stop(self) -> list[dict[str, Any]]:
        """Stop recording, and return the events as Horovod wrote them; none if it was not started."""
        if self._folder is None:
            return []
        folder, self._folder = self._folder, None
        with folder as name:
            self._hvd.stop_timeline()
            content = (Path(name) / "timeline.json").read_text(encoding="utf-8", errors="replace")
            return list(json.loads(content)) if content else []


class StepRecorder(ABC):
    """Records a worker's steps. Local: no collective."""

    hvd: Any  # Horovod's binding of the framework

    def __init__(self, clock: Any) -> None:
        self.timeline = HorovodTimeline(self.hvd)
        self.busy: Callable[[], Busy | None] = clock.busy  # what the clock says; None if it measures nothing
        self._started: Any = None

    def start(self) -> None:
        """Start the framework's profiler."""
        self._started = self._start()

    def stop(self) -> Operations:
        """Stop the framework's profiler and return what it recorded; nothing if it did not start."""
        started, self._started = self._started, None
        return Operations() if started is None else self._stop(started)

    @abstractmethod
    def _start(self) -> Any:
        """Start the framework's profiler; return what ``_stop`` is given."""

    @abstractmethod
    def _stop(self, started: Any) -> Operations:
        """Stop the framework's profiler and return what it recorded."""
