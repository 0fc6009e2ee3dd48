"""Predictions with their ranges, and what measurements say of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.bench.predict import Cluster, Measured, Parts, explained, parts_of
from hvdtrain.bench.predict_curve import ENDS
from hvdtrain.bench.predict_ways import Way
from hvdtrain.bench.spread import Spread

MOST_WORKERS = 64  # unless the user names a number of hosts


@dataclass(frozen=True)
class Check:
    """A step that was predicted and measured.

    Attributes:
        workers: number of workers.
        source: number of workers of the measurement from which it was predicted.
        predicted: seconds.
        measured: seconds.
    """

    workers: int
    source: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How many times as large the larger of both is, minus one."""
        return max(self.predicted / self.measured, self.measured / self.predicted) - 1


@dataclass(frozen=True)
class Forecast:
    """A prediction.

    Attributes:
        cluster: where the workers run.
        way: how they exchange what they learn.
        parts: the parts of the step, with likely values.
        step: seconds of a step.
        speed: samples/s of all workers.
        efficiency: samples/s of a worker relative to one of a full host that waits for nobody.
    """

    cluster: Cluster
    way: Way
    parts: Parts
    step: Spread
    speed: Spread
    efficiency: Spread


def check_here(measured: Measured) -> Check:
    """Return how well the parts of the measured step explain it.

    On a GPU the backward pass may hide any part of the exchange.
    """
    parts, step = explained(measured), measured.step.median
    predicted = parts.step
    if measured.on_gpu:
        least = parts.data + parts.compute + parts.slowest
        predicted = min(max(step, least), predicted)
    return Check(measured.workers, measured.workers, predicted, step)


def check_other(measured: Measured, other: Measured) -> Check | None:
    """Return how well another measurement's step is predicted; None if its workers wait for nobody.

    Computing and waiting for data are the other one's own: a plan predicts full hosts, and other numbers of
    workers on one host keep it busy differently.

    Args:
        measured: what the prediction comes from.
        other: a measurement of the same job on the same hosts with another number of workers.
    """
    if other.workers == 1:
        return None
    found = parts_of(measured, measured.ways[0], Cluster(other.workers, max(other.slots, measured.slots)))
    found = replace(found, data=other.data.median, compute=other.compute.median)
    return Check(other.workers, measured.workers, found.step, other.step.median)


def forecast(measured: Measured, way: Way, cluster: Cluster, error: float = 0.0) -> Forecast:
    """Return a prediction.

    Args:
        measured: what was measured.
        way: how workers exchange what they learn.
        cluster: where they run.
        error: the largest error of the checks, by which the range is widened at both ends.
    """
    parts = {end: parts_of(measured, way, cluster, end) for end in ENDS}
    steps = [one.step for one in parts.values()]
    shares = [one.efficiency for one in parts.values()]
    step = Spread(steps[0], min(steps) / (1 + error), max(steps) * (1 + error))
    samples = cluster.workers * measured.samples
    return Forecast(
        cluster,
        way,
        parts["median"],
        step,
        Spread(samples / step.median, samples / step.high, samples / step.low),
        Spread(shares[0], min(shares) / (1 + error), min(1.0, max(shares) * (1 + error))),
    )


def counts_for(hosts: int | None, slots: int, *, measured_network: bool) -> list[int]:
    """Return the numbers of workers to predict for: 2, 4, 8 and so on, and all slots of all hosts.

    Args:
        hosts: the largest number of hosts; None for as many as ``MOST_WORKERS`` need.
        slots: workers of a host.
        measured_network: whether the network is the one that was measured: then one host tells nothing.
    """
    most = slots * (-(-MOST_WORKERS // slots) if hosts is None else hosts)
    powers = [1 << k for k in range(1, most.bit_length())]
    least = slots if measured_network else 1
    return [count for count in sorted({*powers, most}) if least < count <= most]


def largest_error(checks: Sequence[Check]) -> float:
    """Return the largest error; 0 without checks."""
    return max((check.error for check in checks), default=0.0)
