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
