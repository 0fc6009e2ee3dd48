"""What limits a job with many workers, and what would help it most."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.bench.predict import Cluster, Measured, Parts, parts_of
from hvdtrain.bench.predict_curve import ENDS
from hvdtrain.bench.predict_ways import NONE, Way
from hvdtrain.bench.spread import Spread, in_digits

_GOOD = 0.9  # of a step, what computing takes if nothing limits a job
_LEAST_GAIN = 1.05
_FACTOR = 4  # of the batch
_FASTER = 10  # of the link
_CAVEATS = {
    "fp16": "rounds gradients",
    "powersgd": "approximates gradients",
    "sync-every": "trains differently",
}


Case = tuple[Measured, Way, Cluster]


@dataclass(frozen=True)
class Help:
    """Something that would make a job faster.

    Attributes:
        name: what, in words.
        gain: how many times as many samples/s.
    """

    name: str
    gain: Spread


@dataclass(frozen=True)
class Advice:
    """What limits a job, and what would help.

    Attributes:
        limit: what takes most of what is lost; empty if nothing limits it.
        share: its share of the step.
        helps: what would help, the most helpful first; empty if nothing would for sure.
    """

    limit: str
    share: float
    helps: Sequence[Help]

    def describe(self) -> list[str]:
        """Return it as lines."""
        if not self.limit:
            return ["limited by nothing: workers compute for nearly all of a step. Would help most: nothing"]
        first = f"limited by {self.limit}, {self.share:.0%} of a step"
        if not self.helps:
            return [first, "would help most: nothing that is sure to gain more than the error of the checks"]
        said = [f"{one.name}: {_range(one.gain)} times as fast" for one in self.helps]
        return [first, f"would help most: {said[0]}", *(f"then: {text}" for text in said[1:])]


def advise(
    measured: Measured,
    way: Way,
    cluster: Cluster,
    *,
    others: Sequence[tuple[Measured, float]] = (),
    error: float = 0.0,
) -> Advice:
    """Return what limits a job and what would help.

    A help counts if it gains 5 % and the error of the checks at all ends of what is uncertain, each time with
    the same values for the job with it and without. For another controller, its own error counts if it is
    larger.

    Args:
        measured: what was measured.
        way: how the job's workers exchange what they learn.
        cluster: where they run.
        others: measurements of the job over other controllers, each with the largest error of its checks.
        error: the largest error of the checks.
    """
    parts = parts_of(measured, way, cluster)
    if parts.compute >= _GOOD * parts.step:
        return Advice("", 1 - parts.compute / parts.step, ())
    costs = _costs_of(parts, cluster)
    limit = max(costs, key=lambda name: costs[name])
    now = measured, way, cluster
    helps = [Help(name, _gain(now, changed)) for name, changed in _tries(now)]
    if parts.data > _LEAST_GAIN * parts.step - parts.step:
        helps.append(
            Help("faster reading, such as --read-workers", _gain_without_waiting(measured, way, cluster))
        )
    helps = [one for one in helps if one.gain.low >= _LEAST_GAIN + error]
    helps += _other_controllers(now, others, error)
    helps.sort(key=lambda one: -one.gain.median)
    return Advice(limit, costs[limit] / parts.step, helps[:3])


def _costs_of(parts: Parts, cluster: Cluster) -> dict[str, float]:
    """Return what a step spends on other things than computing, by what it is in words.

    What is hidden behind computing is taken from all parts of the exchange alike.
    """
    exchange = parts.encoding + parts.agreement + parts.transfer
    shown = max(0.0, exchange + parts.rest) / exchange if parts.rest < 0 < exchange else 1.0
    where = "the network's bandwidth" if cluster.hosts > 1 else "the bandwidth between the workers of a host"
    return {
        "waiting for data": parts.data,
        "waiting for the slowest worker": parts.slowest,
        "encoding": parts.encoding * shown,
        "latency: small messages one after the other": parts.agreement * shown,
        where: parts.transfer * shown,
        "copies and other work around the messages": max(0.0, parts.rest),
    }


def _tries(now: Case) -> list[tuple[str, Case]]:
    """Return what could help: a name, and the measurement, the way and the cluster with it."""
    measured, way, cluster = now
    found: list[tuple[str, Case]] = []
    for other in measured.ways:
        if other.name != way.name:
            caveat = next((said for name, said in _CAVEATS.items() if other.name.startswith(name)), "")
            option = other.name if other.name.startswith("sync-every") else f"compression {other.name}"
            name = f"--{option}{_displaced(way, other)}" + (f", which {caveat}" if caveat else "")
            found.append((name, (measured, other, cluster)))
    if way.every == 1:
        name = f"--accumulate {_FACTOR * measured.accumulate}, or a batch {_FACTOR} times as large, "
        name += "which changes the result"
        found.append((name, (measured, replace(way, every=_FACTOR), cluster)))
    if cluster.link is not None and cluster.hosts > 1:
        link = cluster.link.times_as_fast(_FASTER)
        found.append((f"a link {_FASTER} times as fast", (measured, way, replace(cluster, link=link))))
    return found


def _displaced(own: Way, other: Way) -> str:
    """Return which of a job's options must go for another way, in words: local steps take no compression."""
    if own.every > 1:
        return " in place of --sync-every"
    return " in place of --compression" if other.every > 1 and own.name != NONE else ""


def _other_controllers(now: Case, others: Sequence[tuple[Measured, float]], error: float) -> list[Help]:
    """Return the other controllers that are sure to gain more than the errors of both measurements."""
    measured, way, cluster = now
    helps = []
    for one, own_error in others:
        same = next((other for other in one.ways if other.name == way.name), None)
        if same is not None and one.controller != measured.controller:
            found = Help(f"horovodrun --{one.controller.lower()}", _gain(now, (one, same, cluster)))
            if found.gain.low >= _LEAST_GAIN + max(error, own_error):
                helps.append(found)
    return helps


def _range(gain: Spread) -> str:
    """Return both ends in words; one number if they are equal."""
    return " to ".join(dict.fromkeys(in_digits(end, 2) for end in (gain.low, gain.high)))


def _gain(before: Case, after: Case) -> Spread:
    gains = [parts_of(*before, end).step / parts_of(*after, end).step for end in ENDS]
    return Spread(gains[0], min(gains), max(gains))


def _gain_without_waiting(measured: Measured, way: Way, cluster: Cluster) -> Spread:
    found = [parts_of(measured, way, cluster, end) for end in ENDS]
    gains = [one.step / (one.step - one.data) for one in found]
    return Spread(gains[0], min(gains), max(gains))
