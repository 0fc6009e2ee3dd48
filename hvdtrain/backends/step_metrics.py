"""What a step, or an evaluation, adds up to over all workers, and the vector that workers sum for it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from hvdtrain.early_stopping import GRADIENT_NORM


@dataclass(frozen=True)
class ControlFlags:
    """What a worker wants all workers to do after this step."""

    stop: bool = False  # end training, saved
    save: bool = False  # save now and continue
    change: bool = False  # leave this world of an elastic job, and continue in the next one
    # follow what callbacks have frozen or thawed: a worker with this flag undoes the step
    trained: bool = False

    def __bool__(self) -> bool:
        return self.stop or self.save or self.change or self.trained

    def without_change(self) -> "ControlFlags":
        """Return what of it stays to be done when the workers have changed."""
        return ControlFlags(self.stop, self.save)

    def __or__(self, other: "ControlFlags") -> "ControlFlags":
        both = zip(astuple(self), astuple(other), strict=True)
        return ControlFlags(*(one or two for one, two in both)) if other else self


@dataclass(frozen=True)
class StepStatistics:
    """What happened on the host before this step, and how much memory a worker has had until then."""

    skipped_samples: int = 0  # how many samples could not be read and were skipped
    data_wait_seconds: float = 0.0  # how long the worker waited for data
    # the most memory that its process has had, in MiB; one worker reports in a step, so that the sum over
    # workers is that worker's number
    host_peak_mib: float = 0.0
    device_peak_mib: float = 0.0  # likewise, what tensors have had on its GPU


NO_FLAGS = ControlFlags()
NO_STATISTICS = StepStatistics()
SIGNALS = len(fields(ControlFlags)) + len(fields(StepStatistics))  # numbers in the vector
NO_SIGNALS: tuple[float, ...] = SIGNALS * (0.0,)


def encode_signals(
    flags: ControlFlags = NO_FLAGS, statistics: StepStatistics = NO_STATISTICS
) -> tuple[float, ...]:
    """Return flags and statistics as a vector whose sum over workers ``decode_signals`` reads."""
    vector = tuple(map(float, (*vars(flags).values(), *vars(statistics).values())))
    return vector if any(vector) else NO_SIGNALS


def decode_signals(vector: Sequence[float]) -> tuple[ControlFlags, StepStatistics]:
    """Return the flags that any worker raised and the sums of the statistics over all workers."""
    flags, (skipped, *measured) = vector[:4], vector[4:]
    return ControlFlags(*(flag > 0 for flag in flags)), StepStatistics(round(skipped), *measured)


# numbers between the sums and the signals of a step: unused parameters, overflow, norm of the gradient
FINDINGS = 3
NUMBERS_AFTER_SUMS = FINDINGS + SIGNALS


def findings(unused: float = 0.0) -> list[float]:
    """Return these numbers as a worker sends them: those that are known only after the sum are 0."""
    return [unused, *(FINDINGS - 1) * [0.0]]


# where overflow_exhausted and the norm are, from the end of a step's vector
OVERFLOW_INDEX, NORM_INDEX = 1 - NUMBERS_AFTER_SUMS, 2 - NUMBERS_AFTER_SUMS


@dataclass(frozen=True)
class StepMetrics:
    """What a step, or an evaluation, adds up to over all workers."""

    sums: Mapping[str, float]  # name to the weighted sum over samples; "loss" and the task's metrics
    weight: float  # sum of the samples' weights
    unused_parameters: int = 0  # parameters that got no gradient, added up over workers
    unused_names: tuple[str, ...] = ()  # those of this worker, by portable name
    # whether gradients overflow at the lowest loss scale: no scale will help
    overflow_exhausted: bool = False
    flags: ControlFlags = NO_FLAGS  # what any worker wants all of them to do
    statistics: StepStatistics = NO_STATISTICS  # sums over the workers
    # sum of the weights of those names whose values have weights of their own (``Weighted``); of all others
    # it is ``weight``
    weights: Mapping[str, float] = field(default_factory=dict)
    # by rank, how long each worker was busy with its own part of the step before this one; empty if it is not
    # measured
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
        """Return what a vector says: sums, weights, ``timed`` busy seconds, findings and signals."""
        ends = len(names), len(names) + len(weighted), len(names) + len(weighted) + timed
        unused, overflow, norm, *signals = vector[ends[2] :]
        # it is 0 in steps without clip_norm
        measured = {GRADIENT_NORM: norm} if norm and math.isfinite(norm) else {}
        return cls(
            dict(zip(names, vector[: ends[0]], strict=True)) | measured,
            weight,
            round(unused),
            tuple(unused_names),
            overflow > 0,
            *decode_signals(signals),
            weights=dict(zip(weighted, vector[ends[0] : ends[1]], strict=True))
            | dict.fromkeys(measured, 1.0),
            busy_seconds=tuple(vector[ends[1] : ends[2]][:workers]),
        )

    def mean(self, name: str) -> float:
        """Return the mean of a value over what counts; NaN if nothing does."""
        weight = self.weights.get(name, self.weight)
        return self.sums[name] / weight if weight else math.nan

    def without_skipped_samples(self) -> "StepMetrics":
        """Return the metrics with skipped samples taken out of the weight: an evaluation leaves them out."""
        skipped = self.statistics.skipped_samples
        return replace(self, weight=self.weight - skipped) if skipped else self


class PendingVector(ABC):
    """The metrics of a step on their way from the device."""

    def __init__(
        self,
        names: tuple[str, ...],
        vector: Any,
        *others: Any,
        computed: Mapping[str, float] = MappingProxyType({}),
        order: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self._names, self._vector, self._others, self._options = names, vector, others, options
        self._computed, self._order = computed, order

    def read(self) -> StepMetrics:
        """Wait for the device if need be and return the metrics."""
        metrics = StepMetrics.from_vector(self._names, self._numbers(), *self._others, **self._options)
        if not self._computed:
            return metrics
        sums = {**metrics.sums, **self._computed}
        names = dict.fromkeys(name for name in ("loss", *self._order, *sums) if name in sums)
        weights = {**metrics.weights, **dict.fromkeys(self._computed, 1.0)}  # their mean is the value itself
        return replace(metrics, sums={name: sums[name] for name in names}, weights=weights)

    @abstractmethod
    def _numbers(self) -> list[float]:
        """Return the vector when it is on the host."""


@dataclass(frozen=True, slots=True)
class PartialSums:
    """What the batches of an evaluation add up to so far, on this worker."""

    names: tuple[str, ...]  # "loss" and the task's metrics
    weighted: tuple[str, ...]  # those of them that have weights of their own
    values: Any  # a tensor: the weighted sum for each name, then of the weights for each weighted one
    weight: float  # sum of the weights of these batches over all workers
