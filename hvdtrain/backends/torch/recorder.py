"""Recording steps with PyTorch's profiler."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

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
)
from hvdtrain.backends.torch.step_clock import StepClock

_KINDS = {"cpu_op": OPERATION, "kernel": KERNEL, "gpu_memcpy": KERNEL, "gpu_memset": KERNEL}
_LEFT_OUT = ("Trace", "overhead")  # of the profiler itself


class ProfilerRecorder:
    """Records a worker's steps.

    Args:
        clock: measures how long this worker is busy.
    """

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
            return operations_in(json.loads(path.read_text(encoding="utf-8", errors="replace")))

    def busy(self) -> Busy | None:
        """Return what the step clock says; None if it does not measure this job."""
        return self._clock.busy()


def operations_in(trace: dict[str, Any]) -> Operations:
    """Return the spans of a Chrome trace of PyTorch's profiler."""
    epoch_ns, found = int(trace.get("baseTimeNanoseconds", 0)), Operations()
    events = trace["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    places: dict[tuple[Any, Any], int] = {}
    for event in events:
        if event["ph"] != "X" or event.get("cat") in _LEFT_OUT:
            continue
        key = event["pid"], event["tid"]
        if key not in places:
            places[key] = len(found.threads)
            found.threads.append(str(names.get(key, key[1])))
        begin_ns = epoch_ns + round(1000 * event["ts"])
        end_ns = begin_ns + round(1000 * event.get("dur", 0))
        kind = _KINDS.get(event.get("cat", ""), RUNTIME)
        found.spans.append(Operation(places[key], str(event["name"]), begin_ns, end_ns, kind))
    found.spans.sort(key=lambda span: span.begin_ns)
    return found
