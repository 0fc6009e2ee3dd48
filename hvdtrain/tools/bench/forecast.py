"""What a step takes with more workers, from one measurement: the formulas of docs/scaling.md."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any

from hvdtrain.tools.bench.options import Link
from hvdtrain.tools.message_times import Way
from hvdtrain.tools.spread import Spread

ENDS = ("median", "low", "high")
MOST_WORKERS = 64  # unless the user names a number of hosts
# messages of an agreement that a sum waits for: its own, and what is left of the one under way
_AGREEMENTS = Spread(1.5, 1.0, 2.0)
_OVERLAP = Spread(0.5, 0.0, 1.0)  # of the shorter of two transfers, what the longer one does not hide
_OF_HOPS = Spread(0.5, 0.0, 1.0)  # of the smallest sum: what grows with the hops of its messages
# of 1538 bytes on the wire, 1448 are a message's; some interfaces and shapers count fewer of the others
_PAYLOAD = Spread(0.95, 0.94, 0.96)
# how many times as long the bytes take as the link needs for them: see benchmarks/README.md and docs/bench.md
SATURATION = {
    "Gloo": Spread(1.0, 1.0, 1.5),
    "MPI": Spread(1.4, 1.0, 1.9),
    "NCCL": Spread(1.0, 1.0, 1.7),  # not measured: between a ring that fills the link and the worst of MPI
}
_BLOM = 0.375  # Blom 1958: the expected largest of N normal numbers lies near the quantile of this offset


@dataclass(frozen=True)
class Measured:
    """What was measured of a job."""

    workers: int  # number of workers
    hosts: int  # number of their hosts
    slots: int  # workers of a host
    controller: str  # "MPI" or "Gloo"
    on_gpu: bool  # whether the workers compute on GPUs
    samples: float  # samples of one worker in a step
    way: Way  # the messages of a step
    step: Spread  # seconds of the mean step
    data: Spread  # of it, waiting for data
    compute: Spread  # a step of a worker on its own while its host's other workers compute, without that wait
    slowest: Spread  # waiting for the slowest worker
    smallest: Spread  # seconds of an all-reduce of few bytes
    byte: Spread  # seconds that each further byte of an all-reduce takes

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Measured":
        """Return what a document of ``bench`` has.

        Raises:
            KeyError, TypeError, ValueError: If it is another document.
        """
        parts, sums, workers = document["part_seconds"], document["all_reduce"], document["workers"]
        few, many = (Spread(**one["horovod_seconds"]) for one in (sums[0], sums[-1]))
        size = sums[-1]["bytes"] - sums[0]["bytes"]
        rates = [max(0.0, getattr(many, end) - getattr(few, end)) / size for end in ENDS]
        own: dict[str, Any] = {name: document[name] for name in ("workers", "hosts", "slots", "controller")}
        own |= {name: Spread(**parts[name]) for name in ("data", "compute", "slowest")}
        found = cls(
            **own,
            on_gpu=not document["device"].endswith(" on the CPU"),
            samples=document["global_batch"] / workers,
            way=Way(**document["exchange"]),
            step=Spread(**document["mean_step_seconds"]),
            smallest=few,
            byte=Spread(rates[0], min(rates), max(rates)),
        )
        if workers < 2 or not found.way.sizes:
            raise ValueError("it is no measurement of two workers or more")
        return found

    @property
    def network(self) -> str:
        """What coordinates the workers and moves the bytes."""
        return f"{self.controller} with NCCL" if self.on_gpu else self.controller

    @property
    def is_ring(self) -> bool:
        """Whether sums are known to go round a ring: Gloo's do, MPI and NCCL choose."""
        return self.controller == "Gloo" and not self.on_gpu


@dataclass(frozen=True)
class Cluster:
    """Where the workers of a prediction run; without a link, in the network that was measured."""

    workers: int
    slots: int
    link: Link | None = None

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.workers // self.slots)


@dataclass(frozen=True)
class Parts:
    """The parts of a step in seconds."""

    data: float  # waiting for data
    compute: float  # computing
    slowest: float = 0.0  # waiting for the slowest worker
    latency: float = 0.0  # the messages of all-reduces, without their bytes
    transfer: float = 0.0  # the bytes of all-reduces
    # what the measured step has in addition to its parts: copies if positive, overlap if negative
    rest: float = 0.0

    @property
    def step(self) -> float:
        """The whole step: what is exchanged costs nothing at best."""
        exchange = max(0.0, self.latency + self.transfer + self.rest)
        return self.data + self.compute + self.slowest + exchange

    @property
    def efficiency(self) -> float:
        """Samples/s of a worker relative to one of a full host that waits for nobody."""
        return (self.data + self.compute) / self.step


PART_NAMES = tuple(one.name for one in fields(Parts))


@dataclass(frozen=True)
class Forecast:
    """A prediction: the likely parts, and seconds of a step, samples/s and efficiency with their ranges."""

    cluster: Cluster
    parts: Parts
    step: Spread
    speed: Spread
    efficiency: Spread


def forecast(measured: Measured, cluster: Cluster) -> Forecast:
    """Return a prediction, whose range is widened by what the parts of the measured step do not explain."""
    parts = [parts_of(measured, cluster, end) for end in ENDS]
    steps, shares = [one.step for one in parts], [one.efficiency for one in parts]
    wider = 1 + unexplained(measured)
    step = Spread(steps[0], min(steps) / wider, max(steps) * wider)
    samples = cluster.workers * measured.samples
    return Forecast(
        cluster,
        parts[0],
        step,
        Spread(samples / step.median, samples / step.high, samples / step.low),
        Spread(shares[0], min(shares) / wider, min(1.0, max(shares) * wider)),
    )


def counts_for(hosts: int | None, slots: int, *, measured_network: bool) -> list[int]:
    """Return the numbers of workers to predict for: 2, 4, 8 and so on, and all slots of all hosts.

    Without a number of hosts, they are as 64 workers need. Of a measured network one host is left out.
    """
    most = slots * (-(-MOST_WORKERS // slots) if hosts is None else hosts)
    powers = [1 << k for k in range(1, most.bit_length())]
    least = slots if measured_network else 1
    return [count for count in sorted({*powers, most}) if least < count <= most]


def parts_of(measured: Measured, cluster: Cluster, end: str = "median") -> Parts:
    """Return the parts of a step.

    At the end "low" or "high" all that is uncertain makes the step shorter, or longer.
    """
    parts = _without_rest(measured, cluster, end)
    if cluster.workers == 1:
        return parts
    rest = getattr(rest_of(measured), end)
    if end == "high":  # a part of it may grow with the bytes
        rest *= max(1.0, volume_factor(cluster.workers) / volume_factor(measured.workers))
    return replace(parts, rest=rest)


def rest_of(measured: Measured) -> Spread:
    """Return what the measured step has in addition to what its parts explain.

    The ends are those of the shortest and the longest block, and nothing if that lies beyond them.
    """
    parts = explained(measured).step
    rest = measured.step.median - parts
    return Spread(rest, min(0.0, rest, measured.step.low - parts), max(0.0, rest, measured.step.high - parts))


def explained(measured: Measured) -> Parts:
    """Return the parts that the measured step should have, without what is left over."""
    return _without_rest(measured, Cluster(measured.workers, measured.slots), "median")


def unexplained(measured: Measured) -> float:
    """Return by what share the measured step and its parts differ.

    On a GPU the backward pass may hide any part of the exchange.
    """
    parts, step = explained(measured), measured.step.median
    predicted = parts.step
    if measured.on_gpu:
        predicted = min(max(step, parts.data + parts.compute + parts.slowest), predicted)
    return max(predicted / step, step / predicted) - 1


def _without_rest(measured: Measured, cluster: Cluster, end: str) -> Parts:
    data, compute = getattr(measured.data, end), getattr(measured.compute, end)
    if cluster.workers == 1:
        return Parts(data, compute)
    way = measured.way
    growth = getattr(waiting_growth(measured.workers, cluster.workers), end)
    agreement, of_sum = _latencies(measured, cluster, end)
    latency = way.agreements * agreement + (len(way.sizes) + way.small) * of_sum
    transfer = sum(_transfer(measured, size, cluster, end) for size in way.sizes)
    slowest = getattr(measured.slowest, end) * growth
    return Parts(data, compute, slowest, latency / way.every, transfer / way.every)


def waiting_growth(before: int, workers: int) -> Spread:
    """Return how many times as long a step of more workers waits for the slowest of them.

    The likely value is the expected largest of N normal numbers. The ends are those of an exponential tail,
    and of one worker that is slower than the others in all steps, for which more workers do not wait longer.
    """
    if before < 2 or workers < 2:
        return Spread(1.0, 1.0, 1.0)
    quantile = NormalDist().inv_cdf
    normal = [quantile((count - _BLOM) / (count + 1 - 2 * _BLOM)) for count in (workers, before)]
    tail = [sum(1 / k for k in range(2, count + 1)) for count in (workers, before)]
    likely, other = normal[0] / normal[1], tail[0] / tail[1]
    return Spread(likely, min(1.0, likely, other), max(1.0, likely, other))


def volume_factor(workers: int) -> float:
    """Return how many times a buffer's bytes each worker sends in a ring: 2(N-1)/N."""
    return 2 * (workers - 1) / workers


def halving_volume_factor(workers: int) -> float:
    """Return the same of MPI's halving and doubling (Rabenseifner's algorithm).

    If the number of workers is no power of two, the others' data goes to them first and the sum back last.
    """
    power = 2 ** (workers.bit_length() - 1)
    return volume_factor(power) + (0 if power == workers else 2)


def _ring(workers: int) -> int:
    return 2 * (workers - 1)


def _tree(workers: int) -> int:
    return max(0, workers - 1).bit_length()


def _latencies(measured: Measured, cluster: Cluster, end: str) -> tuple[float, float]:
    """Return seconds of an agreement, with what does not grow with the workers, and of a sum's hops."""
    before, agreements = measured.workers, getattr(_AGREEMENTS, end)
    by_mpi = measured.controller == "MPI"
    most = _ring(before)
    hops = most if measured.is_ring else math.sqrt(min(2 * _tree(before), most) * most)
    hops += agreements * (_tree(before) if by_mpi else most)
    smallest = getattr(measured.smallest, end)
    local = crossing = getattr(_OF_HOPS, end) * smallest / hops
    if cluster.link is not None and cluster.hosts > 1:
        crossing = max(local, getattr(cluster.link.latency, end))
    far = _tree(cluster.hosts)
    share = cluster.hosts / cluster.workers if cluster.hosts > 1 else 0.0
    ring = _ring(cluster.workers) * (share * crossing + (1 - share) * local)
    tree = far * crossing + (_tree(cluster.workers) - far) * local
    if measured.hosts > 1 and end != "low":  # of the hops of a tree that were measured, those within hosts
        tree = far * local * _tree(before) / _tree(measured.hosts)  # are short
    least = ring if measured.is_ring else min(2 * tree, ring)
    summing = {"median": math.sqrt(least * ring), "low": least, "high": ring}[end]
    return smallest - local * hops + agreements * (tree if by_mpi else ring), summing


def _transfer(measured: Measured, size: int, cluster: Cluster, end: str) -> float:
    """Return seconds that a buffer's bytes take."""
    ratio = volume_factor(cluster.workers) / volume_factor(measured.workers)
    inside = getattr(measured.byte, end) * size * ratio
    if cluster.link is None or cluster.hosts == 1:
        return float(inside)
    # with several workers on each host, han sums within hosts first; the low end is a ring
    transport = "NCCL" if measured.on_gpu else measured.controller
    is_halved = transport == "MPI" and cluster.slots == 1 and end != "low"
    sent = (halving_volume_factor if is_halved else volume_factor)(cluster.workers) * size
    payload = getattr(_PAYLOAD, {"low": "high", "high": "low"}.get(end, end))
    outside = getattr(SATURATION[transport], end) * 8 * sent / cluster.link.bits_per_second / payload
    return float(max(inside, outside) + getattr(_OVERLAP, end) * min(inside, outside))
