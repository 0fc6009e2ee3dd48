"""How long a worker is busy with its part of a step; each framework's ``step_clock.py`` takes the time."""


class StepClockBase:
    """What the clocks of both frameworks know of the job.

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
        self._size = size
        self._is_measured = is_measured and size > 1
        self.timed = size if self._is_measured else 0
