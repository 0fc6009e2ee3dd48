"""What a step, or an evaluation, adds up to over all workers, and the vector that workers sum for it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdtrain.backends.step_signals import (
    NO_FLAGS,
    NO_STATISTICS,
    SIGNALS,
    ControlFlags,
    StepStatistics,
    decode_signals,
)

FINDINGS = 2  # numbers between the sums and the signals of a step: unused parameters, overflow
NUMBERS_AFTER_SUMS = FINDINGS + SIGNALS
OVERFLOW_INDEX = 1 - NUMBERS_AFTER_SUMS  # where overflow_exhausted is, from the end of a step's vector


@dataclass(frozen=True)
class StepMetrics:
    """What a step, or an evaluation, adds up to over all workers.

    Attributes:
        sums: name to the weighted sum over samples; "loss" and the task's metrics.
        weight: sum of the samples' weights.
        weights: sum of the weights of those names whose values have weights of their own (``Weighted``);
            of all others it is ``weight``.
        unused_parameters: parameters that got no gradient, added up over workers.
        unused_names: those of this worker, by portable name.
        overflow_exhausted: whether gradients overflow at the lowest loss scale: no scale will help.
        flags: what any worker wants all of them to do.
        statistics: sums over the workers.
        busy_seconds: by rank, how long each worker was busy with its own part of the step before this one;
            empty if it is not measured.
    """

    sums: Mapping[str, float]
    weight: float
    unused_parameters: int = 0
    unused_names: tuple[str, ...] = ()
    overflow_exhausted: bool = False
    flags: ControlFlags = NO_FLAGS
    statistics: StepStatistics = NO_STATISTICS
    weights: Mapping[str, float] = field(default_factory=dict)
    busy_seconds: tuple[float, ...] = ()

    @classmethod
    def from_vector(
        cls,
        names: Sequence[str],
        vector: Sequence[float],
        weight: float,
        unused_names: Sequence[str] = (),
        weighted: Sequence[str] = (),
        *,
        timed: int = 0,
        workers: int | None = None,
    ) -> "StepMetrics":
        """Return what a reduced vector says.

        It consists of a sum for each name, a sum of weights for each weighted name, the busy seconds of
        ``timed`` ranks (all that there may be, or none), ``FINDINGS`` numbers and the signals.

        Args:
            names: "loss" and the metrics.
            vector: the reduced vector.
            weight: sum of the samples' weights over all workers.
            unused_names: this worker's parameters without a gradient.
            weighted: those of the names that have weights of their own.
            timed: see above.
            workers: how many ranks there were in the step; None if as many as are timed.
        """
        ends = len(names), len(names) + len(weighted), len(names) + len(weighted) + timed
        unused, overflow, *signals = vector[ends[2] :]
        return cls(
            dict(zip(names, vector[: ends[0]], strict=True)),
            weight,
            round(unused),
            tuple(unused_names),
            overflow > 0,
            *decode_signals(signals),
            weights=dict(zip(weighted, vector[ends[0] : ends[1]], strict=True)),
            busy_seconds=tuple(vector[ends[1] : ends[2]][:workers]),
        )

    def mean(self, name: str) -> float:
        """Return the mean of a value over what counts; NaN if nothing does."""
        weight = self.weights.get(name, self.weight)
        return self.sums[name] / weight if weight else math.nan

    def with_computed(self, values: Mapping[str, float], order: Sequence[str]) -> "StepMetrics":
        """Return the metrics with values of the whole evaluation among them.

        Args:
            values: the values by name.
            order: names in the order that the metrics are to have; others keep their place after these.
        """
        if not values:
            return self
        sums = {**self.sums, **values}
        first = [name for name in ("loss", *order) if name in sums]
        weights = {**self.weights, **dict.fromkeys(values, 1.0)}  # their mean is the value itself
        return replace(
            self, sums={name: sums[name] for name in dict.fromkeys((*first, *sums))}, weights=weights
        )

    def without_skipped_samples(self) -> "StepMetrics":
        """Return the metrics with skipped samples taken out of the weight: an evaluation leaves them out."""
        skipped = self.statistics.skipped_samples
        return replace(self, weight=self.weight - skipped) if skipped else self
