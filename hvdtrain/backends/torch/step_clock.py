"""How long this worker is busy with its own part of a step, in PyTorch, apart from waiting for others."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends import recording
from hvdtrain.workers.agreement import Workers


class StepClock(recording.StepClockBase):
    """Measures how long this worker is busy from one reduction to the next."""

    def __init__(self, workers: Workers, is_measured: bool) -> None:
        super().__init__(workers, is_measured)
        self._seconds = torch.zeros(self.timed)
        self._begun_seconds = time.perf_counter()

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

    def busy(self) -> recording.Busy | None:
        """Return when the time of the next step began, and how long the last one's own part was."""
        if not self._is_measured:
            return None
        begun_seconds = time.time() - (time.perf_counter() - self._begun_seconds)
        return recording.Busy(begun_seconds, float(self._seconds[self._workers.rank]))


_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST = 1_000_000  # operations


class ProfilerRecorder(recording.StepRecorder):
    """Records a worker's steps."""

    hvd = hvd

    def _start(self) -> Any:
        # below it, the profiler's library writes a line to standard error when it starts and when it stops
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        profiler = torch.profiler.profile()
        profiler.start()
        return profiler

    def _stop(self, started: Any) -> recording.Operations:
        started.stop()
        return operations_in(started.profiler.kineto_results.events())


def operations_in(events: Sequence[Any]) -> recording.Operations:
    """Return the spans of what PyTorch's profiler recorded."""
    recording.check_size(len(events), _MOST, "operations")
    found, places = recording.Operations(), dict[tuple[bool, int, int], int]()
    for event in events:
        is_host = event.device_type() == torch.profiler.DeviceType.CPU
        name, number = sys.intern(event.name()), event.device_resource_id()
        if hasattr(event, "activity_type"):
            is_kernel, is_operation = event.activity_type() in _KERNELS, event.activity_type() == "cpu_op"
        else:  # an older PyTorch
            is_kernel, is_operation = not is_host, is_host and "::" in name
        kind = recording.KERNEL if is_kernel else recording.OPERATION if is_operation else recording.RUNTIME
        track = is_host, event.device_index(), number
        if track not in places:
            places[track] = len(found.threads)
            found.threads.append(f"{'thread' if is_host else 'stream'} {number}")
        found.spans.append(recording.Operation(places[track], name, event.start_ns(), event.end_ns(), kind))
    found.spans.sort(key=lambda span: span.begin_ns)
    return found
