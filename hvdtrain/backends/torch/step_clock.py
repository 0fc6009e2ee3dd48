"""How long this worker is busy with its own part of a step, in PyTorch, apart from waiting for others."""

import time

import torch

from hvdtrain.backends.recording import Busy
from hvdtrain.backends.step_clock import StepClockBase
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
        """Note that first sums over workers have arrived, with which this worker goes on computing."""
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
