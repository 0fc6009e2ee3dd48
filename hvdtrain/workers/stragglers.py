"""Which worker the others wait for: how long each was busy in a logged window, and whether that lasts."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.workers.wire_types import travels

_SLOWER = 1.3  # times as long as the median of the others
_LEAST_SHARE = 0.05  # of the window's time that the others lose
_WINDOWS = 3  # in a row
_LEAST_LOST_SECONDS = 1.0  # in these windows: what costs less is not worth a note


@travels
@dataclass
class BusyTimes:
    """How long each worker was busy with its own part of the steps of a window, by rank."""

    # sum over the steps, by rank; empty if it is not measured
    seconds: list[float] = field(default_factory=list)
    # sum over the steps of what a worker waited for the slowest one, the mean over workers
    idle_seconds: float = 0.0
    steps: int = 0  # the number of steps

    def add(self, busy_seconds: Sequence[float]) -> None:
        """Add a step."""
        if not any(busy_seconds):
            return
        if len(busy_seconds) != len(self.seconds):
            self.seconds, self.idle_seconds, self.steps = len(busy_seconds) * [0.0], 0.0, 0
        self.seconds = [a + b for a, b in zip(self.seconds, busy_seconds, strict=True)]
        self.idle_seconds += max(busy_seconds) - statistics.fmean(busy_seconds)
        self.steps += 1

    @property
    def slowest_rank(self) -> int:
        """The rank that was busy longest; the first of several."""
        return self.seconds.index(max(self.seconds))

    def values(self, window_seconds: float) -> dict[str, float]:
        """Return what is logged with a window, by name; nothing if it was not measured."""
        if not self.seconds:
            return {}
        fraction = min(1.0, self.idle_seconds / window_seconds)
        return {"slowest_rank": self.slowest_rank, "wait_fraction": round(fraction, 6)}


class StragglerWatch:
    """Says once of a worker that it has been slower than the others for several windows."""

    def __init__(self) -> None:
        self._rank: int | None = None  # who is slower now
        self._windows, self._lost_seconds = 0, 0.0
        self._noted: set[int] = set()

    def take(self, times: BusyTimes, window_seconds: float) -> str:
        """Take the times of a window; return what the user should know, or nothing."""
        if len(times.seconds) < 2:
            return ""
        rank = times.slowest_rank
        own, median = times.seconds[rank], statistics.median(times.seconds[:rank] + times.seconds[rank + 1 :])
        is_slow = own > _SLOWER * median and own - median >= _LEAST_SHARE * window_seconds
        if not is_slow or rank != self._rank:
            self._rank, self._windows, self._lost_seconds = (rank if is_slow else None), 0, 0.0
        if not is_slow:
            return ""
        self._windows += 1
        self._lost_seconds += own - median
        is_short = self._windows < _WINDOWS or self._lost_seconds < _LEAST_LOST_SECONDS
        if is_short or rank in self._noted:
            return ""
        self._noted.add(rank)
        own_ms, median_ms = (1e3 * seconds / times.steps for seconds in (own, median))
        return (
            f"rank {rank} is slower than the others: it is busy {own_ms:.3g} ms in a step, the median of the "
            f"others {median_ms:.3g} ms; they waited {self._lost_seconds:.1f} s for it in {self._windows} "
            "logged windows. Look at its data, its cores and what else runs on its host"
        )
