"""How long this worker is busy with its own part of a step, in TensorFlow, apart from waiting for others."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.backends import recording
from hvdtrain.backends.tensorflow.batches import TracedWorkers

Tensor = Any


class StepClock(recording.StepClockBase):
    """Measures how long this worker is busy between reductions, within the step, by the host clock."""

    def __init__(self, workers: TracedWorkers, is_measured: bool) -> None:
        super().__init__(workers.workers, is_measured)
        self._traced = workers
        if self._is_measured:
            self._seconds = tf.Variable(0.0, trainable=False, name="busy_seconds")
            self._begun_seconds = tf.Variable(time.time(), trainable=False, name="begun", dtype=tf.float64)

    def enter_world(self) -> None:
        """Forget the time of a step of the world before; this worker's rank may be another now. Local."""
        if self._is_measured:
            self._seconds.assign(np.asarray(0.0, np.float32))
            self.restart()

    def restart(self) -> None:
        """Begin the time of the next step now."""
        if self._is_measured:
            # a Python number would be kept by TensorFlow for ever
            self._begun_seconds.assign(np.asarray(time.time()))

    def numbers(self) -> list[Any]:
        """Return what the vector of a step says of the step before: a number for each rank, or nothing."""
        if not self._is_measured:
            return []
        rank, seconds = self._traced.rank, self._seconds.read_value()
        if self._workers.is_elastic:  # the rank is a tensor
            return [tf.one_hot(rank, self.timed) * seconds]
        return [rank * [0.0], [seconds], (self.timed - 1 - rank) * [0.0]]

    def ready(self, tensors: Sequence[Tensor]) -> None:
        """Note when this worker has computed its gradients, or what else it sends; the last note counts."""
        self._is_waiting = True
        if self._is_measured:
            with tf.control_dependencies(tensors):
                busy = tf.timestamp() - self._begun_seconds.read_value()
            self._seconds.assign(tf.cast(tf.maximum(busy, 0.0), tf.float32))

    def resumed(self, tensors: Sequence[Tensor]) -> None:
        """Note when first sums over workers have arrived, with which this worker continues computing."""
        if self._is_measured:  # the time for which it waited is none of its own
            with tf.control_dependencies(tensors):
                begun = tf.timestamp() - tf.cast(self._seconds.read_value(), tf.float64)
            self._begun_seconds.assign(begun)

    def reduced(self, tensors: Sequence[Tensor]) -> None:
        """Note when the sums over workers have arrived; another note in the same step changes nothing."""
        waits, self._is_waiting = self._is_waiting, False
        if waits and self._is_measured:
            with tf.control_dependencies(tensors):
                self._begun_seconds.assign(tf.timestamp())

    def busy(self) -> recording.Busy | None:
        """Return when the time of the next step began, and how long the last one's own part was."""
        if not self._is_measured:
            return None
        return recording.Busy(float(self._begun_seconds.numpy()), float(self._seconds.numpy()))


_HOST = "/host:"
_START = "profile_start_time"
_LEFT_OUT = ("ThreadpoolListener::",)  # marks of the profiler itself
_MOST_BYTES = 64 << 20  # of a million operations


class ProfilerRecorder(recording.StepRecorder):
    """Records a worker's steps."""

    hvd = hvd

    def _start(self) -> Any:
        profiler = tf.profiler.experimental
        folder = tempfile.TemporaryDirectory(prefix="hvdtrain-profile-", ignore_cleanup_errors=True)
        options = profiler.ProfilerOptions(host_tracer_level=2, python_tracer_level=0, device_tracer_level=1)
        profiler.start(folder.name, options)
        return folder

    def _stop(self, started: Any) -> recording.Operations:
        with started as name:
            tf.profiler.experimental.stop()
            files = sorted(Path(name).rglob("*.xplane.pb"))
            recording.check_size(sum(file.stat().st_size for file in files), _MOST_BYTES, "bytes")
            return operations_in([path.read_bytes() for path in files])


def operations_in(files: list[bytes]) -> recording.Operations:
    """Return the spans of what TensorFlow's profiler wrote: messages of the type XSpace."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2  # nothing else in a job needs it

    found = recording.Operations()
    for content in files:
        planes = xplane_pb2.XSpace.FromString(content).planes
        start_ns = next(
            (
                int(stat.uint64_value or stat.int64_value)
                for plane in planes
                for stat in plane.stats
                if plane.stat_metadata[stat.metadata_id].name == _START
            ),
            0,
        )
        for plane in planes:
            for line in plane.lines:
                # times are relative to the profiler's start, or by the epoch if it is not there
                _add(found, plane, line, start_ns if line.timestamp_ns < start_ns else 0)
    found.spans.sort(key=lambda span: span.begin_ns)
    return found


def _add(found: recording.Operations, plane: Any, line: Any, start_ns: int) -> None:
    """Add the spans of a line: a thread, or a stream of a device."""
    is_host, spans = plane.name.startswith(_HOST), []
    for event in line.events:
        described = plane.event_metadata[event.metadata_id]
        if not event.duration_ps or described.name.startswith(_LEFT_OUT):
            continue
        begin_ns = start_ns + line.timestamp_ns + event.offset_ps // 1000
        # an operation is "name in the graph:type", and its type stands next to it
        is_operation = bool(described.display_name) and described.name.endswith(f":{described.display_name}")
        kind = recording.KERNEL if not is_host else recording.OPERATION if is_operation else recording.RUNTIME
        name = described.display_name if is_operation else described.name
        end_ns = begin_ns + max(1, event.duration_ps // 1000)
        spans.append(recording.Operation(len(found.threads), name, begin_ns, end_ns, kind))
    if spans:
        found.threads.append(line.display_name or line.name or str(line.id))
        found.spans += spans
