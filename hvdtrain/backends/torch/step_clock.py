"""How long this worker is busy with its own part of a step, in PyTorch, apart from waiting for others."""

import time

import torch


class StepClock:
    """Measures how long this worker is busy from one reduction to the next: reading, computing, callbacks.

    The time of a step travels with the next one, since that of a step ends when its gradients are sent.

    Args:
        rank: this worker's.
        size: number of workers.
        is_measured: whether the host sees when gradients are computed, and workers wait for one another only
            in one place of a step.

    Attributes:
        timed: the number of ranks that ``numbers`` speaks of: all, or none if it is not measured.
    """

    def __init__(self, rank: int, size: int, is_measured: bool) -> None:
        self._rank = rank
        self._is_measured = is_measured and size > 1
        self.timed = size if self._is_measured else 0
        self._seconds = torch.zeros(size)
        self._begun_seconds = time.perf_counter()

    def restart(self) -> None:
        """Begin the time of the next step now."""
        self._begun_seconds = time.perf_counter()

    def numbers(self) -> list[torch.Tensor]:
        """Return what the vector of a step says of the step before: a number for each rank, or nothing."""
        return [self._seconds] if self._is_measured else []

    def ready(self) -> None:
        """Note that this worker has computed its gradients."""
        if self._is_measured:
            self._seconds[self._rank] = time.perf_counter() - self._begun_seconds

    def reduced(self) -> None:
        """Note that the sums over workers have arrived."""
        self._begun_seconds = time.perf_counter()
