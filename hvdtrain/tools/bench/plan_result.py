"""What ``plan`` measures and predicts: as a JSON document, and as tables."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.storage.text import counted
from hvdtrain.tools.bench.forecast import (
    PART_NAMES,
    Cluster,
    Forecast,
    Measured,
    Way,
    counts_for,
    explained,
    forecast,
    unexplained,
)
from hvdtrain.tools.bench.plan_options import USUAL_LINKS, Link, PlanOptions
from hvdtrain.tools.bench.plan_scope import check_cluster
from hvdtrain.tools.bench.spread import Spread, in_digits

VERSION = 3  # of the documents
_FEW = 3.0  # of half a range, what its last digit should stand for at most
_GOOD = 0.9  # of a step, what computing takes if nothing limits a job
_HEAD = [
    "workers",
    "hosts",
    "samples/s",
    "efficiency",
    "data",
    "compute",
    "slowest",
    "latency",
    "bytes",
    "rest",
]
_NOTES = (
    "efficiency is relative to workers of full hosts that wait for nobody; likely parts of a step are in ms",
    "not predicted: evaluations, checkpoints, hosts that differ, and how many samples a training needs "
    "(docs/scaling.md)",
)
_LIMITS = {  # by the part: what it is, and what helps
    "data": ("waiting for data", ("more reader processes (--read-workers)",)),
    "slowest": (
        "waiting for the slowest worker",
        ("idle hosts that are alike (python -m hvdtrain doctor)", "a larger batch or --accumulate"),
    ),
    "latency": (
        "latency: small messages one after the other",
        ("--accumulate or --sync-every", "MPI in place of Gloo", "more workers on each of fewer hosts"),
    ),
    "transfer": (
        "bandwidth",
        ("a larger batch or --accumulate", "--compression or --sync-every", "a faster link"),
    ),
    "rest": ("copies and other work of the exchange", ("a larger batch or --accumulate",)),
}


@dataclass(frozen=True)
class Record:
    """A measurement with what it is of.

    Attributes:
        task: the task.
        device: framework, version and device.
        measured: what was measured.
        warnings: why figures may be wrong.
        notes: what else the user should know.
    """

    task: str
    device: str
    measured: Measured
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()

    def to_document(self) -> dict[str, Any]:
        """Return it as JSON holds it; times are in seconds."""
        return {**asdict(self), "unexplained": unexplained(self.measured)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Record":
        """Return the record of a document that ``to_document`` has made.

        Raises:
            KeyError, TypeError, ValueError: If it is another document.
        """
        given = document["measured"]
        of_measured = {one.name: given[one.name] for one in fields(Measured)}
        spreads = {one.name: Spread(**given[one.name]) for one in fields(Measured) if one.type is Spread}
        measured = Measured(**{**of_measured, **spreads, "way": Way(**given["way"])})
        if measured.workers < 2 or not measured.way.sizes or not measured.step.median > 0:
            raise ValueError("it is no measurement of two workers or more")
        texts = [list(map(str, document[name])) for name in ("warnings", "notes")]
        return cls(str(document["task"]), str(document["device"]), measured, *texts)


def read_records(path: Path) -> list[Record]:
    """Return the measurements that an earlier plan has written.

    Raises:
        UsageError: If the file cannot be read, or is no plan's.
    """
    again = "Measure again: python -m hvdtrain plan --json FILE ..."
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version, found = document["version"], document["measurements"]
        if version != VERSION:
            raise UsageError(f"--from {path}: version {version} is not known here, only {VERSION}", again)
        records = [Record.from_document(one) for one in found]
        for one in records:
            forecast(one.measured, Cluster(one.measured.workers, one.measured.slots))
        if not records:
            raise ValueError("it has no measurement")
    except OSError as error:
        raise UsageError(f"--from {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        raise UsageError(f"--from {path}: it is not a document that plan --json writes", again) from None
    return records


@dataclass(frozen=True)
class Table:
    """The predictions over one controller and one link, from few to many workers."""

    record: Record
    link: Link | None
    rows: Sequence[Forecast]

    @property
    def title(self) -> str:
        """Controller and link."""
        measured = self.record.measured
        without = "the network that was measured" if measured.hosts > 1 else "one host"
        return f"{measured.network}, {without if self.link is None else self.link.name + ' between hosts'}"

    @property
    def limit(self) -> tuple[str, float]:
        """Return the part that takes most of the largest job's step beside computing, and its share.

        Returns:
            An empty text if computing takes nearly all. What is hidden behind computing is taken from all
            parts of the exchange alike.
        """
        parts = self.rows[-1].parts
        if parts.compute >= _GOOD * parts.step:
            return "", 1 - parts.compute / parts.step
        exchange = parts.latency + parts.transfer
        shown = max(0.0, exchange + parts.rest) / exchange if parts.rest < 0 < exchange else 1.0
        factors = {"latency": shown, "transfer": shown}
        costs = {name: factors.get(name, 1.0) * getattr(parts, name) for name in _LIMITS}
        name = max(costs, key=lambda name: costs[name])
        return name, costs[name] / parts.step

    def describe(self) -> list[str]:
        """Return its lines."""
        cells = [
            [
                f"{row.cluster.workers}",
                f"{row.cluster.hosts}",
                describe_rounded(row.speed),
                f"{describe_rounded(row.efficiency.times(100))} %",
                *(in_digits(getattr(row.parts, name) * 1e3, 3) for name in PART_NAMES),
            ]
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(_HEAD, *cells, strict=True)]
        lines = [
            "    " + "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True))
            for line in (_HEAD, *cells)
        ]
        busy = "; measured on a busy machine, see the warnings" if self.record.warnings else ""
        name, share = self.limit
        if not name:
            said = "limited by nothing: workers compute for nearly all of a step"
        else:
            said = f"limited by {_LIMITS[name][0]}, {share:.0%} of a step; what helps: "
            said += ", ".join(_LIMITS[name][1])
        return [f"  {self.title}{busy}", *lines, f"    {self.rows[-1].cluster.workers} workers: {said}"]

    def to_document(self) -> dict[str, Any]:
        """Return its predictions and its advice for the JSON document."""
        measured = self.record.measured
        of = {"controller": measured.controller, "link": None if self.link is None else self.link.name}
        name, share = self.limit
        limit, helps = _LIMITS.get(name, ("", ()))
        rows = [
            {
                **of,
                "way": measured.way.name,
                "workers": row.cluster.workers,
                "hosts": row.cluster.hosts,
                "step_seconds": row.step.to_dict(),
                "samples_per_second": row.speed.to_dict(),
                "efficiency": row.efficiency.to_dict(),
                "part_seconds": asdict(row.parts),
            }
            for row in self.rows
        ]
        workers = self.rows[-1].cluster.workers
        advice = {**of, "workers": workers, "limit": limit, "share": share, "helps": list(helps)}
        return {"predictions": rows, "advice": advice}


@dataclass(frozen=True)
class Plan:
    """All measurements, and the predictions in their order."""

    records: Sequence[Record]
    tables: Sequence[Table]

    def describe(self) -> str:
        """Return it as the text that is shown."""
        first = self.records[0]
        samples = f"{in_digits(first.measured.samples, 6)} samples of each worker in a step"
        lines = [f"plan: {first.task} with {first.device}, {samples}; exchange: {first.measured.way.name}"]
        lines += [line for one in self.records for line in _measurement(one.measured)]
        lines += [line for table in self.tables for line in table.describe()]
        notes = dict.fromkeys((*(text for one in self.records for text in one.notes), *_NOTES))
        warnings = dict.fromkeys(
            f"over {one.measured.controller}: {text}" for one in self.records for text in one.warnings
        )
        lines += [f"  note: {text}" for text in notes]
        return "\n".join([*lines, *(f"  warning: {text}" for text in warnings)])

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document; times are in seconds."""
        tables = [table.to_document() for table in self.tables]
        return {
            "version": VERSION,
            "measurements": [one.to_document() for one in self.records],
            "predictions": [one for table in tables for one in table["predictions"]],
            "advice": [table["advice"] for table in tables],
        }


def make_plan(records: Sequence[Record], options: PlanOptions) -> Plan:
    """Return the predictions that the options name.

    Raises:
        UsageError: If they do not follow from these measurements, or there are none.
    """
    tables = []
    for one in records:
        measured = one.measured
        slots = options.slots or measured.slots
        check_cluster(measured.hosts, measured.slots, options)
        counts = counts_for(options.hosts, slots, measured_network=measured.hosts > 1)
        has_link = measured.hosts == 1 and counts[-1] > slots
        links: Sequence[Link | None] = options.link or USUAL_LINKS if has_link else (None,)
        for link in links:
            rows = [forecast(measured, Cluster(count, slots, link)) for count in counts]
            tables.append(Table(one, link, rows))
    return Plan(records, tables)


def _measurement(measured: Measured) -> list[str]:
    step, compute = (describe_rounded(one.times(1e3)) for one in (measured.step, measured.compute))
    return [
        f"  measured {measured.workers} workers on {counted(measured.hosts, 'host')} over "
        f"{measured.network}: step {step} ms, of it computing {compute} ms",
        f"    its parts explain {in_digits(explained(measured).step * 1e3, 3)} ms: ranges are widened by "
        f"{unexplained(measured):.0%}",
    ]


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
