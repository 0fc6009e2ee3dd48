"""Measured numbers with their spread, and the parts of a step."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_FEW = 3.0  # of half a range, what its last digit should stand for at most


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, and the lowest and the highest of them."""

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
        """Return it as a text: the median, and the range in parentheses."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"

    def describe_rounded(self) -> str:
        """Return the same in no more digits than the range supports."""
        half = max((self.high - self.low) / 2, abs(self.median) * 1e-3)
        place = math.floor(math.log10(half / _FEW)) if half > 0 else 0
        return "{} ({} to {})".format(*(_rounded(one, place) for one in (self.median, self.low, self.high)))

    def to_dict(self) -> dict[str, float]:
        """Return it for a JSON document."""
        return asdict(self)


def _rounded(value: float, place: int) -> str:
    """Return a number up to a power of ten, or to its first digit if that stands behind it."""
    if value:
        place = min(place, math.floor(math.log10(abs(value))))
    return f"{round(value, -place):,.{max(0, -place)}f}"


def in_digits(value: float, digits: int) -> str:
    """Return a number with so many digits that count, and without an exponent."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


@dataclass(frozen=True)
class Block:
    """Steps that were timed one after the other on all workers."""

    step_seconds: Sequence[Sequence[float]]  # by rank, how long each step took
    wait_seconds: float  # how long a worker waited for data in a step, on average

    @property
    def mean_seconds(self) -> float:
        """The mean step of all workers."""
        return statistics.fmean(map(statistics.fmean, self.step_seconds))

    @property
    def slowest_seconds(self) -> float:
        """The mean over the steps of the slowest worker's time: what a step takes if all wait for it."""
        return statistics.fmean(max(of_step) for of_step in zip(*self.step_seconds, strict=True))


PARTS = ("data", "compute", "slowest", "communication")


def split_of(job: Block, alone: Block | None) -> dict[str, float]:
    """Return the parts of a step, which add up to it."""
    data = job.wait_seconds
    if alone is None:
        return dict(zip(PARTS, (data, job.mean_seconds - data, 0.0, 0.0), strict=True))
    compute = alone.mean_seconds - alone.wait_seconds
    slowest = alone.slowest_seconds - alone.mean_seconds
    rest = job.mean_seconds - data - compute - slowest
    return dict(zip(PARTS, (data, compute, slowest, rest), strict=True))
