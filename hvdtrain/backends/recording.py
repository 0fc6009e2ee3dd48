"""Recording steps: what each framework's ``recorder.py`` gives, and Horovod's timeline."""

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_TIMELINE, _DYNAMIC = "HOROVOD_TIMELINE", "DYNAMIC"

OPERATION, KERNEL, RUNTIME = "operation", "kernel", "runtime"


class Operation(NamedTuple):
    """A span that a framework's profiler recorded.

    Attributes:
        thread: the thread, or the stream of a device, by its place in ``Operations.threads``.
        name: what it did.
        begin_ns: when it began, in nanoseconds since the epoch by this host's clock.
        end_ns: when it ended.
        kind: ``OPERATION`` for one of the framework's operations on the host, ``KERNEL`` for work of a
            device, ``RUNTIME`` for what calls or waits for them.
    """

    thread: int
    name: str
    begin_ns: int
    end_ns: int
    kind: str


@dataclass
class Operations:
    """What a framework's profiler recorded.

    Attributes:
        threads: names of threads and streams.
        spans: the spans, in the order of their beginnings.
    """

    threads: list[str] = field(default_factory=list)
    spans: list[Operation] = field(default_factory=list)


class Busy(NamedTuple):
    """What a worker's step clock says between two steps.

    Attributes:
        begun_seconds: when the time of the next step began, in seconds since the epoch: when the sums over
            workers had arrived, or the clock was restarted.
        busy_seconds: how long the worker was busy with its own part of the last step, until it was ready to
            reduce its gradients.
    """

    begun_seconds: float
    busy_seconds: float


class StepRecorder(Protocol):
    """Records a worker's steps. Local: no collective."""

    timeline: "HorovodTimeline"

    def start(self) -> None:
        """Start the framework's profiler.

        Raises:
            Exception: If it cannot start: another one runs, for example.
        """
        ...

    def stop(self) -> Operations:
        """Stop the framework's profiler and return what it recorded.

        Raises:
            Exception: If what it recorded cannot be read.
        """
        ...

    def busy(self) -> Busy | None:
        """Return what the step clock says; None if it does not measure this job."""
        ...


def request_timeline() -> None:
    """Let Horovod's next ``init()`` be ready to record a timeline, unless the user has it record one."""
    os.environ.setdefault(_TIMELINE, _DYNAMIC)


class HorovodTimeline:
    """Horovod's timeline of some steps, which rank 0 writes into a temporary file.

    Args:
        hvd: ``horovod.torch`` or ``horovod.tensorflow``.
    """

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Begin to record.

        Raises:
            Exception: If Horovod cannot; the text says why.
        """
        if (given := os.environ.get(_TIMELINE, "")) != _DYNAMIC:
            raise RuntimeError(
                f"{_TIMELINE} is {given!r}: Horovod writes the timeline of the whole job there"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="hvdtrain-timeline-", ignore_cleanup_errors=True)
        self._hvd.start_timeline(str(Path(self._folder.name) / "timeline.json"))

    def stop(self) -> list[dict[str, Any]]:
        """Stop recording, and return the events as Horovod wrote them; none if it was not started.

        Raises:
            Exception: If they cannot be read.
        """
        if self._folder is None:
            return []
        folder, self._folder = self._folder, None
        with folder as name:
            self._hvd.stop_timeline()
            content = (Path(name) / "timeline.json").read_text(encoding="utf-8", errors="replace")
            return list(json.loads(content)) if content else []
