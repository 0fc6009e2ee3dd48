"""A learning rate that rises from step to step, and what the losses say of it: pure functions."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_FORGET = 0.9  # of the running mean that tells divergence, per step
_TIMES_LOWEST = 4.0  # the running mean's lowest value
_SMALL_FALL, _RECOVERY = 0.1, 0.25  # of the whole fall, and of the fall so far
_MARGIN = 0.1  # of the whole fall, by which a divergence that ends on a plateau passes the first value
_SIGMAS = 6.0  # of a mean, by which it falls where losses do not merely scatter
_MEDIAN_JUMP = 0.6745 * math.sqrt(2)  # of normally distributed losses, in their standard deviation
_WIDTHS = 50  # of the centred mean's standard deviation, in the length of the curve


@dataclass(frozen=True)
class Rise:
    """A learning rate that rises exponentially.

    Attributes:
        lowest: that of the first step.
        highest: that of the last step.
        steps: number of steps.
    """

    lowest: float
    highest: float
    steps: int

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        part = min(step / (self.steps - 1), 1.0)
        return float(self.lowest * (self.highest / self.lowest) ** part)


@dataclass
class Curve:
    """The losses of steps whose learning rate rises. The same on every worker.

    Attributes:
        rates: learning rates, in order.
        losses: the loss of each step, before its update.
        stopped: the learning rate at which the loss was seen to diverge; None if it was not.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    stopped: float | None = None
    _sum: float = 0.0
    _weight: float = 0.0
    _lowest: float = math.inf

    def add(self, rate: float, loss: float) -> None:
        """Add a step; nothing after the loss has diverged.

        It has diverged when its running mean is more than 4 times the lowest value that it had, and above
        the first loss: the second matters for losses that are small or negative.
        """
        if self.stopped is not None:
            return
        if not math.isfinite(loss):
            self.stopped = rate
            return
        self.rates.append(rate)
        self.losses.append(loss)
        self._sum = _FORGET * self._sum + (1 - _FORGET) * loss
        self._weight = _FORGET * self._weight + (1 - _FORGET)
        mean = self._sum / self._weight
        self._lowest = min(self._lowest, mean)
        limit = max(self._lowest + (_TIMES_LOWEST - 1) * abs(self._lowest), self.losses[0])
        if mean > limit:
            self.stopped = rate

    @property
    def diverged(self) -> float | None:
        """The learning rate at which the smoothed loss, after its lowest, passes its first value.

        What is seen to diverge has begun to do so before: a mean lags behind. If it was not seen, as the loss
        rose to a plateau, it has to pass its first value clearly. None if it did not diverge.
        """
        means = self.smoothed()
        if self.stopped is None and not self._falls(means):
            return None
        lowest = means.index(min(means))
        limit = means[0] + (_MARGIN * (means[0] - means[lowest]) if self.stopped is None else 0.0)
        above = [rate for rate, mean in zip(self.rates, means, strict=True) if mean > limit]
        return next((rate for rate in above if rate > self.rates[lowest]), self.stopped)

    def smoothed(self) -> list[float]:
        """Return the losses as centred means, so that no value lags behind its learning rate."""
        return smoothed(self.losses)

    def steepest(self) -> float | None:
        """Return the learning rate at which the loss falls fastest, per factor of the rate.

        Only what comes before the lowest loss counts, and before the loss first rises by a quarter of what it
        had fallen: a fall after that is a recovery. None if the loss does not fall by more than it scatters.
        """
        means = self.smoothed()
        if not self._falls(means):
            return None
        last = self._calm_until(means)
        slopes = [(means[at + 1] - means[at - 1]) / 2 for at in range(1, min(last, len(means) - 2) + 1)]
        if not slopes or min(slopes) >= 0:
            return None
        return self.rates[1 + slopes.index(min(slopes))]

    def _falls(self, means: Sequence[float]) -> bool:
        """Return whether the means fall by more than they do where losses are nothing but noise."""
        return len(means) >= 3 and means[0] - means[self._calm_until(means)] > _SIGMAS * self._noise()

    def _noise(self) -> float:
        """Return by how much a centred mean scatters, from how the losses jump from step to step.

        The median counts, so that what is seen is not how they rise where they diverge.
        """
        if len(self.losses) < 2:
            return 0.0
        jump = statistics.median(abs(later - loss) for loss, later in pairwise(self.losses))
        return jump / _MEDIAN_JUMP / math.sqrt(2 * math.sqrt(math.pi) * _width(len(self.losses)))

    def _calm_until(self, means: Sequence[float]) -> int:
        """Return the place of the lowest mean before the first one that is far above it."""
        fall, lowest, noise = means[0] - min(means), 0, _SIGMAS * self._noise()
        for at, mean in enumerate(means):
            fallen = means[0] - means[lowest]
            if fallen > _SMALL_FALL * fall and mean - means[lowest] > max(_RECOVERY * fallen, noise):
                break
            if mean < means[lowest]:
                lowest = at
        return lowest


def _width(count: int) -> float:
    return max(count / _WIDTHS, 1.0)


def edge(count: int) -> int:
    """Return how many means at each end of a curve are of clearly fewer losses than the others."""
    return math.ceil(2 * _width(count))


def smoothed(values: Sequence[float]) -> list[float]:
    """Return each value's mean with its neighbours, weighted by a bell whose width is 1/50 of the length."""
    width = _width(len(values))
    reach = math.ceil(3 * width)
    bell = [math.exp(-0.5 * (offset / width) ** 2) for offset in range(reach + 1)]
    found = []
    for at in range(len(values)):
        near = range(max(0, at - reach), min(len(values), at + reach + 1))
        weight = sum(bell[abs(other - at)] for other in near)
        found.append(sum(bell[abs(other - at)] * values[other] for other in near) / weight)
    return found
