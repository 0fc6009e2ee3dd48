"""A measured number with its spread."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, and the lowest and the highest of them.

    Attributes:
        median: the median.
        low: the lowest.
        high: the highest.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of one measurement or more."""
        return cls(statistics.median(values), min(values), max(values))

    def times(self, factor: float) -> "Spread":
        """Return it in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def describe(self, digits: int = 2) -> str:
        """Return it in words: the median, and the range in parentheses."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"

    def to_dict(self) -> dict[str, float]:
        """Return it for a JSON document."""
        return asdict(self)


def in_digits(value: float, digits: int) -> str:
    """Return a number with so many digits that count, and without an exponent."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


@dataclass(frozen=True)
class Block:
    """Steps that were timed one after the other on all workers.

    Attributes:
        step_seconds: by rank, how long each step took.
        wait_seconds: by rank, how long the worker waited for data in a step: the mean over the steps.
    """

    step_seconds: Sequence[Sequence[float]]
    wait_seconds: Sequence[float]

    @property
    def mean_seconds(self) -> float:
        """The mean step of all workers."""
        return statistics.fmean(statistics.fmean(of_rank) for of_rank in self.step_seconds)

    @property
    def slowest_seconds(self) -> float:
        """The mean over the steps of the slowest worker's time: what a step takes if all wait for it."""
        return statistics.fmean(max(of_step) for of_step in zip(*self.step_seconds, strict=True))

    @property
    def mean_wait_seconds(self) -> float:
        """How long a worker waited for data in a step, on average."""
        return statistics.fmean(self.wait_seconds)

    def chunks(self, length: int) -> list[float]:
        """Return the mean of every so many steps of the first worker."""
        of_first = self.step_seconds[0]
        ends = range(length, len(of_first) + 1, length)
        return [statistics.fmean(of_first[end - length : end]) for end in ends]


@dataclass(frozen=True)
class Split:
    """The parts of a step's time; those of one pair of blocks add up to the step.

    Attributes:
        data: waiting for data.
        compute: what a step takes without other workers, while all of them compute.
        slowest: waiting for the worker that is slowest in a step.
        communication: what is left: what reducing gradients adds to a step.
    """

    data: float
    compute: float
    slowest: float
    communication: float


PARTS = tuple(Split.__dataclass_fields__)


def split_of(job: Block, alone: Block) -> Split:
    """Return the parts of a step.

    Args:
        job: steps of the job.
        alone: the same steps of each worker on its own, at the same time on all workers.
    """
    compute = alone.mean_seconds - alone.mean_wait_seconds
    slowest = alone.slowest_seconds - alone.mean_seconds
    data = job.mean_wait_seconds
    return Split(data, compute, slowest, job.mean_seconds - data - compute - slowest)


def split_of_one(job: Block) -> Split:
    """Return the parts of a step of a job with one worker, which waits for nobody."""
    return Split(job.mean_wait_seconds, job.mean_seconds - job.mean_wait_seconds, 0.0, 0.0)


def spread_of_parts(splits: Sequence[Split]) -> dict[str, Spread]:
    """Return the spread of each part over the pairs of blocks."""
    return {name: Spread.of([getattr(split, name) for split in splits]) for name in PARTS}
