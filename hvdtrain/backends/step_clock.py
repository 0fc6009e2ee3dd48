"""How long a worker is busy with its part of a step; each framework's ``step_clock.py`` takes the time."""

from hvdtrain.workers.agreement import Workers


class StepClockBase:
    """What the clocks of both frameworks know of the job.

    Args:
        workers: the job's workers.
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
