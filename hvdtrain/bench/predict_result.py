"""What ``plan`` predicts: as a JSON document, and as tables."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.bench.predict import PART_NAMES, Cluster
from hvdtrain.bench.predict_advice import Advice, advise
from hvdtrain.bench.predict_cluster import check_cluster
from hvdtrain.bench.predict_evidence import Evidence
from hvdtrain.bench.predict_forecast import Forecast, counts_for, forecast
from hvdtrain.bench.predict_link import Link
from hvdtrain.bench.predict_notes import notes_on
from hvdtrain.bench.predict_options import USUAL_LINKS, PlanOptions
from hvdtrain.bench.predict_record import VERSION
from hvdtrain.bench.spread import Spread, in_digits
from hvdtrain.words import counted

_FEW = 3.0  # of half a range, what its last digit should stand for at most
_LEAST_WHOLE = 0.0095  # smaller shares need more than whole percents
_NOTES = (
    "ranges have all that is uncertain at its best and at its worst at once, widened by the largest error of "
    "the checks; efficiency is relative to workers of full hosts that wait for nobody",
    "not predicted: evaluations, checkpoints, hosts that differ, and what compression and local steps change "
    "in the result (docs/scaling.md)",
)


@dataclass(frozen=True)
class Table:
    """The predictions over one controller and one link.

    Attributes:
        evidence: the measurement that they come from.
        link: the link of each host; None for the network that was measured, or on one host.
        rows: for each number of workers, a prediction for each way; the job's own one is the first.
        advice: what limits the largest number of workers, and what would help.
    """

    evidence: Evidence
    link: Link | None
    rows: Sequence[Sequence[Forecast]]
    advice: Advice

    @property
    def title(self) -> str:
        """Controller and link in words."""
        measured = self.evidence.record.measured
        if self.link is not None:
            return f"{measured.network}, {self.link.name} between hosts"
        return f"{measured.network}, " + (
            "the network that was measured" if measured.hosts > 1 else "one host"
        )

    def describe(self) -> list[str]:
        """Return its lines."""
        head = ["workers", "hosts", "samples/s", *(f"{one.way.name}" for one in self.rows[0])]
        cells = [
            [
                f"{row[0].cluster.workers}",
                f"{row[0].cluster.hosts}",
                describe_rounded(row[0].speed),
                *(_percent(one.efficiency) for one in row),
            ]
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in [head, *cells]) for column in range(len(head))]
        lines = [
            "    " + "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True))
            for line in [head, *cells]
        ]
        most = self.rows[-1][0].cluster.workers
        first, *others = self.advice.describe()
        busy = "; measured on a busy machine, see the warnings" if self.evidence.warnings else ""
        lines += [f"    {most} workers: {first}", *(f"      {line}" for line in others)]
        return [f"  {self.title}{busy}", *lines]


@dataclass(frozen=True)
class Plan:
    """All predictions.

    Attributes:
        evidence: the measurements.
        tables: the predictions, in the order of the measurements.
    """

    evidence: Sequence[Evidence]
    tables: Sequence[Table]

    @property
    def notes(self) -> list[str]:
        """What these predictions leave out."""
        records = [one.record for one in self.evidence]
        counts = [row[0].cluster.workers for table in self.tables for row in table.rows]
        return notes_on(records, [table.link for table in self.tables], counts)

    def describe(self) -> str:
        """Return it as the text that is shown."""
        record = self.evidence[0].record
        samples = f"{in_digits(record.measured.samples, 6)} samples of each worker in a step"
        lines = [f"plan: {record.task} with {record.device}, {samples}; the job's way: {record.own_way}"]
        for one in self.evidence:
            lines += _measurement(one)
        for table in self.tables:
            lines += table.describe()
        measured = (text for one in self.evidence for text in one.record.notes)
        notes = dict.fromkeys((*measured, *self.notes, *_NOTES))
        warnings = dict.fromkeys(
            f"over {one.record.measured.controller}: {text}" for one in self.evidence for text in one.warnings
        )
        return "\n".join([
            *lines, *(f"  note: {text}" for text in notes), *(f"  warning: {text}" for text in warnings)
        ])  # fmt: skip

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document; times are in seconds."""
        return {
            "version": VERSION,
            "measurements": [one.to_document() for one in self.evidence],
            "notes": self.notes,
            "predictions": [
                {"controller": table.evidence.record.measured.controller, **_prediction(one)}
                for table in self.tables
                for row in table.rows
                for one in row
            ],
            "advice": [
                {
                    "controller": table.evidence.record.measured.controller,
                    "link": None if table.link is None else table.link.name,
                    "workers": table.rows[-1][0].cluster.workers,
                    "limit": table.advice.limit,
                    "share": table.advice.share,
                    "helps": [asdict(one) for one in table.advice.helps],
                }
                for table in self.tables
            ],
        }


def make_plan(evidence: Sequence[Evidence], options: PlanOptions) -> Plan:
    """Return the predictions that the options ask for.

    Raises:
        UsageError: If they cannot be computed from these measurements, or are none.
    """
    tables = []
    for one in evidence:
        measured = one.record.measured
        slots = options.slots or measured.slots
        check_cluster(measured.hosts, measured.slots, options)
        counts = counts_for(options.hosts, slots, measured_network=measured.hosts > 1)
        has_link = measured.hosts == 1 and counts[-1] > slots
        links: Sequence[Link | None] = options.link or USUAL_LINKS if has_link else (None,)
        own = one.record.way
        ways = [own, *(way for way in measured.ways if way.name != own.name)]
        for link in links:
            rows = [
                [forecast(measured, way, Cluster(count, slots, link), one.error) for way in ways]
                for count in counts
            ]
            others = [(other.record.measured, other.error) for other in evidence if other is not one]
            last = Cluster(counts[-1], slots, link)
            advice = advise(measured, own, last, others=others, error=one.error)
            tables.append(Table(one, link, rows, advice))
    return Plan(evidence, tables)


def _measurement(evidence: Evidence) -> list[str]:
    measured = evidence.record.measured
    lines = [
        f"  measured {measured.workers} workers on {counted(measured.hosts, 'host')} over "
        f"{measured.network}: step "
        f"{describe_rounded(measured.step.times(1e3))} ms, of it computing "
        f"{describe_rounded(measured.compute.times(1e3))} ms"
    ]
    for check in evidence.checks:
        source = "its parts" if check.source == check.workers else f"{check.source} workers"
        lines.append(
            f"    check: {check.workers} workers from {source}: predicted "
            f"{in_digits(check.predicted * 1e3, 3)} ms, measured {in_digits(check.measured * 1e3, 3)} ms"
        )
    return [*lines, f"    ranges are widened by {evidence.error:.0%}"]


def _prediction(one: Forecast) -> dict[str, Any]:
    return {
        "link": None if one.cluster.link is None else one.cluster.link.name,
        "way": one.way.name,
        "workers": one.cluster.workers,
        "hosts": one.cluster.hosts,
        "step_seconds": one.step.to_dict(),
        "samples_per_second": one.speed.to_dict(),
        "efficiency": one.efficiency.to_dict(),
        "part_seconds": {name: getattr(one.parts, name) for name in PART_NAMES},
    }


def describe_rounded(spread: Spread) -> str:
    """Return a median with its range, in no more digits than the range supports.

    The last digit stands for at most a third of half the range, and for a thousandth of the median at least.
    """
    half = max((spread.high - spread.low) / 2, abs(spread.median) * 1e-3)
    place = math.floor(math.log10(half / _FEW)) if half > 0 else 0
    return "{} ({} to {})".format(*(_rounded(one, place) for one in (spread.median, spread.low, spread.high)))


def _rounded(value: float, place: int) -> str:
    """Return a number up to a power of ten, or to its first digit if that stands behind it."""
    if value:
        place = min(place, math.floor(math.log10(abs(value))))
    return f"{round(value, -place):,.{max(0, -place)}f}"


def _percent(share: Spread) -> str:
    said = (
        f"{100 * one:.0f}" if one >= _LEAST_WHOLE else in_digits(100 * one, 1)
        for one in (share.median, share.low, share.high)
    )
    return "{} % ({}-{})".format(*said)
