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

    def straggler(self, window_seconds: float) -> "Straggler | None":
        """Return the worker that the others waited for in this window, if one stands out."""
        if len(self.seconds) < 2:
            return None
        rank = self.slowest_rank
        own = self.seconds[rank]
        median = statistics.median(self.seconds[:rank] + self.seconds[rank + 1 :])
        if own <= _SLOWER * median or own - median < _LEAST_SHARE * window_seconds:
            return None
        return Straggler(rank, own / self.steps, median / self.steps, own - median)


@dataclass(frozen=True)
class Straggler:
    """A worker that was slower than the others in a window."""

    rank: int  # its rank
    step_seconds: float  # how long it was busy in a step
    others_seconds: float  # the median of the others
    lost_seconds: float  # how long the others waited for it in the window


class StragglerWatch:
    """Says when a worker has been slower than the others for several windows, and when it no longer is."""

    def __init__(self) -> None:
        self._candidate: int | None = None
        self._windows = 0
        self._lost_seconds = 0.0
        self._noted: int | None = None

    def take(self, times: BusyTimes, window_seconds: float) -> str:
        """Take the times of a window; return what the user should know, or nothing."""
        if not times.seconds:
            return ""
        found = times.straggler(window_seconds)
        rank = None if found is None else found.rank
        if rank != self._candidate:
            self._candidate, self._windows, self._lost_seconds = rank, 0, 0.0
        self._windows += 1
        self._lost_seconds += 0.0 if found is None else found.lost_seconds
        if rank == self._noted or self._windows < _WINDOWS:
            return ""
        if found is None:
            before, self._noted = self._noted, None
            return f"rank {before} is no longer slower than the others"
        if self._lost_seconds < _LEAST_LOST_SECONDS:
            return ""
        self._noted = rank
        own, others = 1e3 * found.step_seconds, 1e3 * found.others_seconds
        return (
            f"rank {rank} is slower than the others: it is busy {own:.3g} ms in a step, the median of the "
            f"others {others:.3g} ms; they waited {self._lost_seconds:.1f} s for it in {self._windows} "
            "logged windows. Look at its data, its cores and what else runs on its host"
        )
