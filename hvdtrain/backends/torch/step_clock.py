"""How long this worker is busy with its own part of a step, in PyTorch, apart from waiting for others."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch

from hvdtrain.backends.recording import (
    KERNEL,
    OPERATION,
    RUNTIME,
    Busy,
    HorovodTimeline,
    Operation,
    Operations,
    StepClockBase,
    check_size,
)
from hvdtrain.workers.agreement import Workers


class StepClock(StepClockBase):
    """Measures how long this worker is busy from one reduction to the next: reading, computing, callbacks.

    The time of a step travels with the next one, since that of a step ends when its gradients are sent.
    """

    def __init__(self, workers: Workers, is_measured: bool) -> None:
        super().__init__(workers, is_measured)
        self._seconds = torch.zeros(self.timed)
        self._begun_seconds = time.perf_counter()
        self._is_waiting = False

    def enter_world(self) -> None:
        """Forget what a rank of the world before had measured. Local."""
        self._seconds.zero_()
        self.restart()

    def restart(self) -> None:
        """Begin the time of the next step now."""
        self._begun_seconds = time.perf_counter()

    def numbers(self) -> list[torch.Tensor]:
        """Return what the vector of a step says of the step before: a number for each rank, or nothing."""
        return [self._seconds] if self._is_measured else []

    def ready(self) -> None:
        """Note that this worker has computed its gradients, or what else it sends; the last note counts."""
        self._is_waiting = True
        if self._is_measured:
            self._seconds[self._workers.rank] = time.perf_counter() - self._begun_seconds

    def resumed(self) -> None:
        """Note that first sums over workers have arrived, with which this worker continues computing."""
        if self._is_measured:  # the time for which it waited is none of its own
            self._begun_seconds = time.perf_counter() - float(self._seconds[self._workers.rank])

    def reduced(self) -> None:
        """Note that the sums over workers have arrived; another note in the same step changes nothing."""
        if self._is_waiting:
            self._is_waiting = False
            self._begun_seconds = time.perf_counter()

    def busy(self) -> Busy | None:
        """Return when the time of the next step began, and how long the last one's own part was."""
        if not self._is_measured:
            return None
        begun_seconds = time.time() - (time.perf_counter() - self._begun_seconds)
        return Busy(begun_seconds, float(self._seconds[self._workers.rank]))


_KINDS = {"cpu_op": OPERATION, "kernel": KERNEL, "gpu_memcpy": KERNEL, "gpu_memset": KERNEL}
_LEFT_OUT = ("Trace", "overhead")  # of the profiler itself
_MOST_BYTES = 256 << 20  # of a million operations


class ProfilerRecorder:
    """Records a worker's steps."""

    def __init__(self, clock: StepClock) -> None:
        self.timeline = HorovodTimeline(hvd)
        self._clock = clock
        self._profiler: torch.profiler.profile | None = None

    def start(self) -> None:
        """Start the framework's profiler."""
        # below it, the profiler's library writes a line to standard error when it starts and when it stops
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        profiler = torch.profiler.profile()
        profiler.start()
        self._profiler = profiler

    def stop(self) -> Operations:
        """Stop the framework's profiler and return what it recorded."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return Operations()
        profiler.stop()
        with tempfile.TemporaryDirectory(prefix="hvdtrain-profile-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            check_size([path], _MOST_BYTES)
            return operations_in(path.read_text(encoding="utf-8", errors="replace"))

    def busy(self) -> Busy | None:
        """Return what the step clock says; None if it does not measure this job."""
        return self._clock.busy()


def operations_in(content: str) -> Operations:
    """Return the spans of a Chrome trace of PyTorch's profiler."""
    trace = json.loads(content, object_hook=_small)
    epoch_ns, found = int(trace.get("baseTimeNanoseconds", 0)), Operations()
    events = trace["traceEvents"]
    names = {event.track: event.name for event in events if isinstance(event, _Thread)}
    places: dict[tuple[Any, Any], int] = {}
    for event in events:
        if not isinstance(event, _Span):
            continue
        if event.track not in places:
            places[event.track] = len(found.threads)
            found.threads.append(str(names.get(event.track, event.track[1])))
        begin_ns = epoch_ns + round(1000 * event.begin_us)
        end_ns = begin_ns + round(1000 * event.length_us)
        found.spans.append(Operation(places[event.track], event.name, begin_ns, end_ns, event.kind))
    found.spans.sort(key=lambda span: span.begin_ns)
    return found


class _Span(NamedTuple):
    track: tuple[Any, Any]
    name: str
    begin_us: float
    length_us: float
    kind: str


class _Thread(NamedTuple):
    track: tuple[Any, Any]
    name: str


def _small(value: dict[str, Any]) -> Any:
    """Return what is kept of an object of the trace as it is read: all together they take a gigabyte."""
    if "ph" not in value:
        return value
    if value["ph"] == "M" and value["name"] == "thread_name":
        return _Thread((value["pid"], value["tid"]), value["args"]["name"])
    if value["ph"] != "X" or value.get("cat") in _LEFT_OUT:
        return None
    kind = _KINDS.get(value.get("cat", ""), RUNTIME)
    name = sys.intern(str(value["name"]))
    return _Span((value["pid"], value["tid"]), name, value["ts"], value.get("dur", 0), kind)
