"""What a step takes with more workers, from one measurement: the formulas of docs/scaling.md."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from hvdtrain.bench.predict_curve import (
    AGREEMENTS,
    Curve,
    agreement_hops,
    halving_volume_factor,
    ring_hops,
    sum_hops,
    tree_hops,
    volume_factor,
)
from hvdtrain.bench.predict_link import Link
from hvdtrain.bench.predict_waiting import wait_for_slowest
from hvdtrain.bench.predict_ways import Way
from hvdtrain.bench.spread import Spread

_OVERLAP = Spread(0.5, 0.0, 1.0)  # of the shorter of two transfers, what the longer one does not hide


@dataclass(frozen=True)
class Measured:
    """What one measurement tells of a job.

    Attributes:
        workers: number of workers that were measured.
        hosts: number of their hosts.
        slots: workers of a host.
        controller: "MPI" or "Gloo".
        on_gpu: whether the workers compute on GPUs.
        samples: samples of one worker in a step.
        step: mean step with the other workers, without compression.
        data: of it, waiting for data.
        compute: a step of a worker on its own while its host's other workers compute, without that wait.
        lag: how much longer than the mean the steps of the slowest worker take for good.
        deviations: steps of workers on their own minus their mean.
        curve: all-reduces by size.
        raw: the smallest all-reduce without Horovod; None if that was not measured.
        ways: how workers can exchange what they learn; the first one is without compression.
        accumulate: micro-batches of a step.
    """

    workers: int
    hosts: int
    slots: int
    controller: str
    on_gpu: bool
    samples: float
    step: Spread
    data: Spread
    compute: Spread
    lag: Spread
    deviations: Sequence[float]
    curve: Curve
    raw: Spread | None
    ways: Sequence[Way] = field(default=())
    accumulate: int = 1

    @property
    def transport(self) -> str:
        """What moves the bytes: "NCCL" on GPUs, or the controller."""
        return "NCCL" if self.on_gpu else self.controller

    @property
    def network(self) -> str:
        """What coordinates the workers and moves the bytes, in words."""
        return f"{self.controller} with NCCL" if self.on_gpu else self.controller

    @property
    def is_ring(self) -> bool:
        """Whether sums are known to go round a ring: Gloo's do, MPI and NCCL choose."""
        return self.controller == "Gloo" and not self.on_gpu


@dataclass(frozen=True)
class Cluster:
    """Where the workers of a prediction run.

    Attributes:
        workers: number of workers.
        slots: workers of a host; the last one may have fewer.
        link: the link of each host; None for the network that was measured.
    """

    workers: int
    slots: int
    link: Link | None = None

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.workers // self.slots)


@dataclass(frozen=True)
class Parts:
    """The parts of a step in seconds.

    Attributes:
        data: waiting for data.
        compute: computing.
        slowest: waiting for the slowest worker.
        encoding: turning gradients into messages and back.
        agreement: small messages, and the hops of all messages.
        transfer: bytes on their way.
        rest: what the measured step has beside its parts: copies if positive, overlap if negative.
    """

    data: float
    compute: float
    slowest: float = 0.0
    encoding: float = 0.0
    agreement: float = 0.0
    transfer: float = 0.0
    rest: float = 0.0

    @property
    def step(self) -> float:
        """The whole step: what is exchanged costs nothing at best."""
        exchange = max(0.0, self.encoding + self.agreement + self.transfer + self.rest)
        return self.data + self.compute + self.slowest + exchange

    @property
    def efficiency(self) -> float:
        """Samples/s of a worker relative to one of a full host that waits for nobody."""
        return (self.data + self.compute) / self.step


PART_NAMES = tuple(one.name for one in fields(Parts))


def parts_of(measured: Measured, way: Way, cluster: Cluster, end: str = "median") -> Parts:
    """Return the parts of a step.

    Args:
        measured: what was measured.
        way: how workers exchange what they learn.
        cluster: where they run.
        end: "median", or "low" or "high": all that is uncertain at the end that makes the step shorter, or
            longer.
    """
    bare = _bare_parts(measured, way, cluster, end)
    if cluster.workers == 1:
        return bare
    return replace(bare, rest=getattr(rest_of(measured), end) / way.every)


def rest_of(measured: Measured) -> Spread:
    """Return what the measured step has beside what its parts explain.

    The ends are those of the shortest and the longest block, and nothing if that lies beyond them.
    """
    parts = explained(measured).step
    rest = measured.step.median - parts
    return Spread(rest, min(0.0, rest, measured.step.low - parts), max(0.0, rest, measured.step.high - parts))


def alone_share(measured: Measured) -> float:
    """Return by what a worker's own parts are multiplied at their low ends, 1 at most.

    It is less than 1 if the shortest block of the measured step is shorter than what its workers need on
    their own: then they were disturbed while they were measured on their own.
    """
    waiting = wait_for_slowest(measured.deviations, measured.workers)
    alone = measured.data.low + measured.compute.low + measured.lag.low + waiting.low
    return min(1.0, measured.step.low / alone) if alone > 0 else 1.0


def explained(measured: Measured) -> Parts:
    """Return the parts that the measured step should have, without what is left over."""
    here = Cluster(measured.workers, measured.slots)
    return _bare_parts(measured, measured.ways[0], here, "median")


def _bare_parts(measured: Measured, way: Way, cluster: Cluster, end: str) -> Parts:
    workers = cluster.workers
    share = alone_share(measured) if end == "low" else 1.0
    data, compute = (share * getattr(part, end) for part in (measured.data, measured.compute))
    if workers == 1:
        return Parts(data, compute)
    waiting = wait_for_slowest(measured.deviations, workers, way.every)
    small, of_sum, at_once = _latencies(measured, cluster, end)
    messages = len(way.sizes) + way.small
    more_bytes = volume_factor(workers) / volume_factor(measured.workers)
    transfers = [_transfer(measured, size, cluster, end) for size in way.sizes]
    return Parts(
        data=data,
        compute=compute,
        slowest=share * (getattr(measured.lag, end) + getattr(waiting, end)),
        encoding=(getattr(way.encoding, end) + getattr(way.summing, end) * more_bytes) / way.every,
        agreement=(way.agreements * (small + at_once) + messages * of_sum) / way.every,
        transfer=sum(transfers) / way.every,
    )


def _latencies(measured: Measured, cluster: Cluster, end: str) -> tuple[float, float, float]:
    """Return seconds of a sum that do not grow with the workers, of its hops, and of an agreement's hops."""
    agreements = getattr(AGREEMENTS, end)
    before = measured.workers
    smallest = getattr(measured.curve.smallest(), end)
    of_sum = sum_hops(before, measured.is_ring).median
    all_hops = agreements * agreement_hops(before, measured.controller) + of_sum
    if measured.raw is None:  # a hop lies between nothing and an equal part of the smallest sum
        local = {"median": 0.5, "low": 0.0, "high": 1.0}[end] * smallest / all_hops
    else:
        raw_hops = of_sum if measured.is_ring else tree_hops(before)
        local = min(getattr(measured.raw, end) / raw_hops, smallest / all_hops)
    crossing = local
    if cluster.link is not None and cluster.hosts > 1:
        crossing = max(local, getattr(cluster.link.latency, end))
    ring, tree = _ring_seconds(cluster, local, crossing), _tree_seconds(cluster, local, crossing)
    if measured.hosts > 1 and end != "low":
        # what was measured is a mean over the hops of a tree, of which those within hosts are short
        tree = _tree_seconds(cluster, 0.0, local * tree_hops(before) / tree_hops(measured.hosts))
    agreeing = tree if measured.controller == "MPI" else ring
    least = ring if measured.is_ring else min(2 * tree, ring)
    summing = {"median": math.sqrt(least * ring), "low": least, "high": ring}[end]
    return smallest - local * all_hops, summing, agreements * agreeing


def _ring_seconds(cluster: Cluster, local: float, crossing: float) -> float:
    """Return what the hops of a ring take, of which each host has one to another host."""
    share = cluster.hosts / cluster.workers if cluster.hosts > 1 else 0.0
    return ring_hops(cluster.workers) * (share * crossing + (1 - share) * local)


def _tree_seconds(cluster: Cluster, local: float, crossing: float) -> float:
    """Return what the hops of a tree take, whose first ones stay within hosts."""
    far = tree_hops(cluster.hosts)
    return far * crossing + (tree_hops(cluster.workers) - far) * local


def _transfer(measured: Measured, size: int, cluster: Cluster, end: str) -> float:
    """Return seconds that a buffer's bytes take."""
    ratio = volume_factor(cluster.workers) / volume_factor(measured.workers)
    inside = getattr(measured.curve.volume_seconds(size), end) * ratio
    if cluster.link is None or cluster.hosts == 1:
        return float(inside)
    # with several workers on each host, han sums within hosts first; the low end is a ring
    is_halved = measured.transport == "MPI" and cluster.slots == 1 and end != "low"
    factor = halving_volume_factor if is_halved else volume_factor
    sent = factor(cluster.workers) * size
    outside = getattr(cluster.link.seconds_for(sent, measured.transport), end)
    return float(max(inside, outside) + getattr(_OVERLAP, end) * min(inside, outside))
