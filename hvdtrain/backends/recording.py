"""Recording steps: what each framework's ``step_clock.py`` gives, and Horovod's timeline."""

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from hvdtrain.backends.custom_step import (
    different_calls,
    different_metrics,
    different_weighting,
    metrics_code,
)
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers


class StepClockBase:
    """What the clocks of both frameworks know of the job.

    Args:
        is_measured: whether the host sees when gradients are computed, and workers wait for one another only
            in one place of a step.

    Attributes:
        timed: the number of ranks that ``numbers`` speaks of: the most that the job may have, so that the
            vector of a step keeps its length when workers come and go; none if it is not measured.
    """

    def __init__(self, workers: Workers, is_measured: bool) -> None:
        self._workers = workers
        self._is_measured = is_measured and workers.may_reduce
        self.timed = workers.most if self._is_measured else 0


Check = TypeVar("Check")


class CallsBase(ABC, Generic[Check]):
    """Checks that all workers make the same calls in a step, with an all-reduce of four numbers for each.

    If they did not, each would wait for sums that others do not compute. The numbers are two codes and their
    squares: the mean and the mean square are this worker's only if all codes are equal.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._codes = {"": 0.0} | {name: 1.0 + place for place, name in enumerate(names)}
        self._number = 0

    def begin(self) -> None:
        """Begin a step. Local: no collective."""
        self._number = 0

    def announce(self, name: str, is_weighted: bool) -> Check:
        """Collective. Begin the check of a call, which raises TaskError on all workers if calls differ."""
        return self._announce(name, float(is_weighted), different_weighting(name, self._number))

    def announce_end(self, names: Sequence[str], weighted: Sequence[str]) -> Check:
        """Collective. Begin the check of the end of a step.

        It raises TaskError on all workers if another made a call or returned other metrics.
        """
        return self._announce("", metrics_code(names, weighted), different_metrics(names, weighted))

    def _announce(self, name: str, form: float, different_form: TaskError) -> Check:
        number, code = self._number, self._codes[name]
        self._number += 1
        return self._compare(name, number, [code, code * code, form, form * form], different_form)

    def _different_call(self, name: str, number: int) -> TaskError:
        """Return the error of a call that is another one on another worker."""
        return different_calls(f"gradients() of {name!r}" if name else "the end", number)

    @abstractmethod
    def _compare(self, name: str, number: int, codes: list[float], different_form: TaskError) -> Check:
        """Collective. Begin to compare codes with those of the other workers."""


_SHOWN = 3


def largest_tensors(made: Iterable[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Return the largest kinds of tensors, the largest first: what they are, how many, and bytes of each."""
    counts = Counter(made)
    kinds = sorted(counts, key=lambda kind: (-kind[1], -counts[kind], kind[0]))[:_SHOWN]
    return tuple((f"{counts[kind]} x {kind[0]}" if counts[kind] > 1 else kind[0], kind[1]) for kind in kinds)


_TIMELINE, _DYNAMIC = "HOROVOD_TIMELINE", "DYNAMIC"
_ELSEWHERE = "Horovod writes the timeline of the whole job there"
_NOT_READY = (
    "Horovod was started without a timeline, by an earlier training of this process or by its script: of the "
    "trainings of a process, the first one must have the profile"
)

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


class StepRecorder(Protocol):
    """Records a worker's steps. Local: no collective."""

    timeline: "HorovodTimeline"

    def start(self) -> None:
        """Start the framework's profiler."""
        ...

    def stop(self) -> Operations:
        """Stop the framework's profiler and return what it recorded."""
        ...

    def busy(self) -> Busy | None:
        """Return what the step clock says; None if it does not measure this job."""
        ...


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


def check_size(files: Iterable[Path], most_bytes: int) -> None:
    """Check that what a profiler wrote can be read without taking memory that the training needs."""
    if (size := sum(file.stat().st_size for file in files)) > most_bytes:
        raise ValueError(
            f"it has {size / 1e6:,.0f} MB, at most {most_bytes / 1e6:,.0f} are read: record fewer steps"
        )


class HorovodTimeline:
    """Horovod's timeline of some steps, which rank 0 writes into a temporary file."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Begin to record."""
        if (given := os.environ.get(_TIMELINE, "")) != _DYNAMIC:
            raise RuntimeError(f"{_TIMELINE} is {given!r}: {_ELSEWHERE}")
        folder = tempfile.TemporaryDirectory(prefix="hvdtrain-timeline-", ignore_cleanup_errors=True)
        try:
            self._hvd.start_timeline(str(Path(folder.name) / "timeline.json"))
        except ValueError as error:
            folder.cleanup()
            raise RuntimeError(_NOT_READY) from error
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
