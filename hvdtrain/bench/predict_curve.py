"""All-reduces of measured sizes, carried to other sizes and numbers of workers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvdtrain.bench.spread import Spread

ENDS = ("median", "low", "high")
# messages of an agreement that a sum waits for: its own, and what is left of the one under way
AGREEMENTS = Spread(1.5, 1.0, 2.0)


def volume_factor(workers: int) -> float:
    """Return how many times a buffer's bytes each worker sends in a ring: 2(N-1)/N."""
    return 2 * (workers - 1) / workers


def halving_volume_factor(workers: int) -> float:
    """Return how many times a buffer's bytes the busiest worker sends or receives if MPI halves and doubles.

    If the number of workers is no power of two, the others' data goes to them first and the sum back last
    (Rabenseifner's algorithm), while they do nothing else.
    """
    power = 2 ** (workers.bit_length() - 1)
    return volume_factor(power) + (0 if power == workers else 2)


def ring_hops(workers: int) -> int:
    """Return the messages that follow one another in a ring all-reduce: 2(N-1)."""
    return 2 * (workers - 1)


def tree_hops(workers: int) -> int:
    """Return the messages that follow one another if each step doubles who has been heard: log2 N."""
    return max(0, workers - 1).bit_length()


def agreement_hops(workers: int, controller: str) -> int:
    """Return the messages that follow one another in an agreement of Horovod's workers."""
    return tree_hops(workers) if controller == "MPI" else ring_hops(workers)


def sum_hops(workers: int, is_ring: bool) -> Spread:
    """Return the messages that follow one another in the sum of a buffer.

    Args:
        workers: number of workers.
        is_ring: whether it is known to be a ring; otherwise it lies between two trees and a ring.
    """
    most = ring_hops(workers)
    if is_ring or workers < 2:
        return Spread(most, most, most)
    least = min(2 * tree_hops(workers), most)
    return Spread(math.sqrt(least * most), least, most)


@dataclass(frozen=True)
class Curve:
    """How long the sum of a buffer takes among the workers that were measured, against its size.

    Attributes:
        points: bytes and seconds, the smallest first.
    """

    points: Sequence[tuple[int, Spread]]

    def smallest(self) -> Spread:
        """Return the time of the smallest buffer, in which the bytes do not count."""
        return self.points[0][1]

    def volume_seconds(self, size: float) -> Spread:
        """Return by how much a buffer takes longer than the smallest one.

        Between two sizes time grows evenly; beyond the largest one as fast as before it, at least in
        proportion to the size.
        """
        found = [self._volume(size, end) for end in ENDS]
        return Spread(found[0], min(found), max(found))

    def _volume(self, size: float, end: str) -> float:
        least: float = getattr(self.points[0][1], end)
        above: list[tuple[int, float]] = [
            (bytes_, max(0.0, getattr(seconds, end) - least)) for bytes_, seconds in self.points
        ]
        rising = [above[0]]
        for bytes_, seconds in above[1:]:  # noise must not make a larger buffer faster
            rising.append((bytes_, max(seconds, rising[-1][1])))
        if size <= rising[0][0]:
            return 0.0
        for (small, short), (large, long) in pairwise(rising):
            if size <= large:
                return short + (long - short) * (size - small) / (large - small)
        largest, longest = rising[-1]
        return longest * size / largest
