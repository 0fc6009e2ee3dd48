"""How long this worker is busy with its own part of a step, in TensorFlow, apart from waiting for others."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.recording import Busy
from hvdtrain.backends.step_clock import StepClockBase
from hvdtrain.backends.tensorflow.traced_workers import TracedWorkers

Tensor = Any


class StepClock(StepClockBase):
    """Measures how long this worker is busy from one reduction to the next: reading, computing, callbacks.

    The time of a step travels with the next one, since that of a step ends when its gradients are sent. It
    is taken inside of the compiled step, by the system's clock: a step in which that is set back counts 0.
    """

    def __init__(self, workers: TracedWorkers, is_measured: bool) -> None:
        super().__init__(workers.workers, is_measured)
        self._traced = workers
        self._is_waiting = False
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
        """Note when this worker has computed its gradients, or what else it sends; the last note counts.

        Called while a step is traced, as are the next two.

        Args:
            tensors: what is about to be reduced.
        """
        self._is_waiting = True
        if self._is_measured:
            with tf.control_dependencies(tensors):
                busy = tf.timestamp() - self._begun_seconds.read_value()
            self._seconds.assign(tf.cast(tf.maximum(busy, 0.0), tf.float32))

    def resumed(self, tensors: Sequence[Tensor]) -> None:
        """Note when first sums over workers have arrived, with which this worker goes on computing.

        Args:
            tensors: the sums.
        """
        if self._is_measured:  # the time for which it waited is none of its own
            with tf.control_dependencies(tensors):
                begun = tf.timestamp() - tf.cast(self._seconds.read_value(), tf.float64)
            self._begun_seconds.assign(begun)

    def reduced(self, tensors: Sequence[Tensor]) -> None:
        """Note when the sums over workers have arrived; another note in the same step changes nothing.

        Args:
            tensors: the sums.
        """
        waits, self._is_waiting = self._is_waiting, False
        if waits and self._is_measured:
            with tf.control_dependencies(tensors):
                self._begun_seconds.assign(tf.timestamp())

    def busy(self) -> Busy | None:
        """Return when the time of the next step began, and how long the last one's own part was."""
        if not self._is_measured:
            return None
        return Busy(float(self._begun_seconds.numpy()), float(self._seconds.numpy()))
