"""What a step takes with more workers, from one measurement: the formulas of docs/scaling.md."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.tools.bench.options import Link
from hvdtrain.tools.message_times import Way
from hvdtrain.tools.spread import Spread

ENDS = ("median", "low", "high")
MOST_WORKERS = 64  # unless the user names a number of hosts
# messages of an agreement that a sum waits for: its own, and what is left of the one under way
_AGREEMENTS = Spread(1.5, 1.0, 2.0)
_SHORTER = Spread(0.5, 0.0, 1.0)  # of the link's and the memory's time, what the longer one does not hide
_OF_HOPS = Spread(0.5, 0.0, 1.0)  # of the smallest sum: what grows with the hops of its messages
_BACKWARD = Spread(0.6, 0.7, 0.3)  # of computing: when messages may be sent that do not wait for its end
# of 1538 bytes on the wire, 1448 are a message's; some interfaces and shapers count fewer of the others
_PAYLOAD = Spread(0.95, 0.96, 0.94)
# how many times as long the bytes take as the link needs for them, on CPUs and on GPUs (not measured)
_SATURATION = {False: Spread(1.0, 1.0, 1.5), True: Spread(1.0, 1.0, 1.7)}
# for each host: smaller messages are summed over all workers in one level, over MPI by MPI
_LARGE_BYTES = 2**18
_BLOM = 0.375  # Blom 1958: the expected largest of N normal numbers lies near the quantile of this offset


@dataclass(frozen=True)
class Cluster:
    """Where workers run; without a link, in the network that was measured."""

    workers: int
    slots: int
    link: Link | None = None

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.workers // self.slots)


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
        """Return what a document of ``bench`` has."""
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
    def cluster(self) -> Cluster:
        """Where it was measured."""
        return Cluster(self.workers, self.slots)


@dataclass(frozen=True)
class Parts:
    """The parts of a step in seconds."""

    data: float  # waiting for data
    compute: float  # computing
    slowest: float = 0.0  # waiting for the slowest worker
    latency: float = 0.0  # the messages of all-reduces, without their bytes
    transfer: float = 0.0  # the bytes of all-reduces
    overlap: float = 0.0  # what of both is hidden behind the backward pass: zero or negative
    # what the measured step has in addition to its parts: copies if positive, more overlap if negative
    rest: float = 0.0

    @property
    def step(self) -> float:
        """The whole step: what is exchanged costs nothing at best."""
        exchange = max(0.0, self.latency + self.transfer + self.overlap + self.rest)
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
    """Return the numbers of workers to predict for: 2, 4, 8 and so on, and all slots of all hosts."""
    most = slots * (-(-MOST_WORKERS // slots) if hosts is None else hosts)
    powers = [1 << k for k in range(1, most.bit_length())]
    least = slots if measured_network else 1
    return [count for count in sorted({*powers, most}) if least < count <= most]


def parts_of(measured: Measured, cluster: Cluster, end: str = "median") -> Parts:
    """Return the parts of a step."""
    parts = _without_rest(measured, cluster, end)
    if cluster.workers == 1:
        return parts
    known, step = explained(measured).step, measured.step
    rest = step.median - known
    if end == "low":
        rest = min(0.0, rest, step.low - known)
    elif end == "high":  # a part of it may grow with the bytes
        rest = max(0.0, rest, step.high - known)
        rest *= max(1.0, volume_factor(cluster.workers) / volume_factor(measured.workers))
    return replace(parts, rest=rest)


def explained(measured: Measured) -> Parts:
    """Return the parts that the measured step should have, without what is left over."""
    return _without_rest(measured, measured.cluster, "median")


def unexplained(measured: Measured) -> float:
    """Return by what share the measured step and its parts differ.

    A backward pass during which messages are sent may hide any part of the exchange.
    """
    parts, step = explained(measured), measured.step.median
    predicted = parts.step
    if _messages(measured, measured.cluster)[1]:
        longest = replace(parts, overlap=0.0).step
        predicted = min(max(step, parts.data + parts.compute + parts.slowest), longest)
    return max(predicted / step, step / predicted) - 1


def _without_rest(measured: Measured, cluster: Cluster, end: str) -> Parts:
    data, compute = getattr(measured.data, end), getattr(measured.compute, end)
    if cluster.workers == 1:
        return Parts(data, compute)
    way = measured.way
    slowest = getattr(measured.slowest, end) * getattr(waiting_growth(measured.workers, cluster.workers), end)
    sizes, is_early = _messages(measured, cluster)
    agreement, large, small = _latencies(measured, cluster, end)
    agreements = way.agreements
    if is_early:  # messages that are ready while others are sent are agreed upon together
        agreements = {"median": min(2, len(sizes)), "low": 1, "high": len(sizes)}[end]
    count = sum(size >= _LARGE_BYTES * cluster.hosts for size in sizes)
    latency = agreements * agreement + count * large + (len(sizes) - count + way.small) * small
    latency /= way.every
    transfer = sum(_transfer(measured, size, cluster, end) for size in sizes) / way.every
    hidden = 0.0
    if is_early:  # the last message waits for the last gradient
        before_last = (latency + transfer) * (1 - sizes[-1] / sum(sizes))
        hidden = min(before_last, getattr(_BACKWARD, end) * compute / way.passes)
    return Parts(data, compute, slowest, latency, transfer, -hidden)


def _messages(measured: Measured, cluster: Cluster) -> tuple[list[int], bool]:
    """Return the bytes of a step's messages, and whether they are sent during the backward pass."""
    own, early = list(measured.way.sizes), list(measured.way.early)
    if early and cluster.hosts > 1:
        return early, True
    return own, bool(early) and own == early


def waiting_growth(before: int, workers: int) -> Spread:
    """Return how many times as long a step of more workers waits for the slowest of them."""
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


# numbers or seconds of messages that follow one another: within hosts, and from host to host
_Hops = NDArray[np.float64]


def _ring(cluster: Cluster) -> _Hops:
    hops, hosts = 2 * (cluster.workers - 1), cluster.hosts
    share = hosts / cluster.workers if hosts > 1 else 0.0
    return np.array([hops * (1 - share), hops * share])


def _tree(cluster: Cluster) -> _Hops:
    far, all_hops = ((count - 1).bit_length() for count in (cluster.hosts, cluster.workers))
    return np.array([all_hops - far, far], float)


def _levels(measured: Measured, cluster: Cluster) -> tuple[int, int]:
    """Return over how many workers of a host, and then over how many hosts, a large message is summed."""
    if cluster.hosts == 1:
        return cluster.workers, 1
    is_flat = measured.on_gpu or cluster.workers % cluster.slots
    return (1, cluster.workers) if is_flat else (cluster.slots, cluster.hosts)


def _agreement_hops(measured: Measured, cluster: Cluster) -> _Hops:
    return _tree(cluster) if measured.controller == "MPI" else _ring(cluster)


def _small_hops(measured: Measured, cluster: Cluster, end: str) -> _Hops:
    """Return the hops of a small sum: Gloo's goes round a ring, MPI and NCCL choose."""
    ring, tree = _ring(cluster), 2 * _tree(cluster)
    if measured.controller == "Gloo" and not measured.on_gpu:
        return ring
    return {"median": np.sqrt(tree * ring), "low": tree, "high": ring}[end]


def _latencies(measured: Measured, cluster: Cluster, end: str) -> tuple[float, float, float]:
    """Return seconds of an agreement and what does not grow with the workers, of a large and a small sum."""
    before, agreements = measured.cluster, getattr(_AGREEMENTS, end)
    smallest = getattr(measured.smallest, end)
    of_hops = getattr(_OF_HOPS, end) * smallest
    hops = _small_hops(measured, before, "median") + agreements * _agreement_hops(measured, before)
    if before.hosts == 1 or end == "low":
        hop = np.full(2, of_hops / hops.sum())
        if cluster.link is not None and cluster.hosts > 1:
            hop[1] = max(hop[1], getattr(cluster.link.latency, end))
    else:  # of the hops that were measured, those within hosts are short
        hop = np.array([0.0, of_hops / hops[1]])
    agreement = agreements * float(_agreement_hops(measured, cluster) @ hop)
    small = large = float(_small_hops(measured, cluster, end) @ hop)
    if cluster.hosts > 1 and not measured.on_gpu:
        large = float(2 * (np.array(_levels(measured, cluster)) - 1) @ hop)
    return smallest - of_hops + agreement, large, small


def _transfer(measured: Measured, size: int, cluster: Cluster, end: str) -> float:
    """Return seconds that a buffer's bytes take: within the hosts, and then between them."""
    inside, hosts = _levels(measured, cluster)
    memory = getattr(measured.byte, end) * size
    if cluster.link is None and measured.hosts > 1:  # the network that was measured
        return float(memory * volume_factor(hosts) / volume_factor(_levels(measured, measured.cluster)[1]))
    memory /= volume_factor(measured.workers)
    within = memory * volume_factor(inside)
    if hosts == 1:
        return float(within)
    assert cluster.link is not None
    copied = memory * volume_factor(hosts) / inside
    sent = 8 * size * volume_factor(hosts) / cluster.link.bits_per_second / getattr(_PAYLOAD, end)
    sent *= getattr(_SATURATION[measured.on_gpu], end)
    return float(within + max(copied, sent) + getattr(_SHORTER, end) * min(copied, sent))
