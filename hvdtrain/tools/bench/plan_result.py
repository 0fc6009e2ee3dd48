"""What ``plan`` predicts from the documents of measured jobs: as a JSON document, and as tables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.storage.text import counted
from hvdtrain.tools.bench.forecast import (
    PART_NAMES,
    Cluster,
    Forecast,
    Measured,
    counts_for,
    explained,
    forecast,
    unexplained,
)
from hvdtrain.tools.bench.options import USUAL_LINKS, Link, PlanOptions
from hvdtrain.tools.spread import in_digits

VERSION = 4  # of the documents
_GOOD = 0.9  # of a step, what computing takes if nothing limits a job
_HEAD = ("workers", "hosts", "samples/s", "efficiency", *PART_NAMES)
_NOTES = (
    "efficiency is relative to workers of full hosts that wait for nobody; likely parts of a step are in ms",
    "not predicted: hosts that differ, and how many samples a training needs (`hvdtrain docs scaling`)",
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


def read_documents(path: Path) -> list[dict[str, Any]]:
    """Return the measurements that an earlier plan has written."""
    again = "Measure again: python -m hvdtrain plan --json FILE ..."
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version, found = document["version"], list(document["measurements"])
        if version != VERSION:
            raise UsageError(f"--from {path}: version {version} is not known here, only {VERSION}", again)
        for one in found:  # what is damaged must not show later
            measured = Measured.of(one)
            Table(
                one, measured, None, [forecast(measured, Cluster(measured.workers, measured.slots))]
            ).describe()
        if not found:
            raise ValueError("it has no measurement")
    except OSError as error:
        raise UsageError(f"--from {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
        raise UsageError(f"--from {path}: it is not a document that plan --json writes", again) from None
    return found


@dataclass(frozen=True)
class Table:
    """The predictions over one controller and one link, from few to many workers, with what was measured.

    There is no link for the network that was measured, or on one host.
    """

    document: Mapping[str, Any]
    measured: Measured
    link: Link | None
    rows: Sequence[Forecast]

    @property
    def title(self) -> str:
        """Controller and link."""
        without = "the network that was measured" if self.measured.hosts > 1 else "one host"
        link = without if self.link is None else f"{self.link.name} between hosts"
        return f"{self.measured.network}, {link}"

    @property
    def limit(self) -> tuple[str, float]:
        """Return the part that takes most of the largest job's step but for computing, and its share."""
        parts = self.rows[-1].parts
        if parts.compute >= _GOOD * parts.step:
            return "", 1 - parts.compute / parts.step
        exchange = parts.latency + parts.transfer
        hidden = parts.overlap + min(0.0, parts.rest)
        shown = max(0.0, exchange + hidden) / exchange if exchange else 1.0
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
                row.speed.describe_rounded(),
                f"{row.efficiency.times(100).describe_rounded()} %",
                *(in_digits(getattr(row.parts, name) * 1e3, 3) for name in PART_NAMES),
            ]
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(_HEAD, *cells, strict=True)]
        lines = [
            "    " + "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True))
            for line in (_HEAD, *cells)
        ]
        busy = "; measured on a busy machine, see the warnings" if self.document["warnings"] else ""
        name, share = self.limit
        if name:
            said = f"limited by {_LIMITS[name][0]}, {share:.0%} of a step; what helps: "
            said += ", ".join(_LIMITS[name][1])
        else:
            said = "limited by nothing: workers compute for nearly all of a step"
        return [f"  {self.title}{busy}", *lines, f"    {self.rows[-1].cluster.workers} workers: {said}"]

    def to_document(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return its predictions and its advice for the JSON document."""
        name, share = self.limit
        limit, helps = _LIMITS.get(name, ("", ()))
        of = {"controller": self.measured.controller, "link": self.link and self.link.name}
        rows = [
            {
                **of,
                "way": self.measured.way.name,
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
        return rows, {**of, "workers": workers, "limit": limit, "share": share, "helps": list(helps)}


@dataclass(frozen=True)
class Plan:
    """The documents of all measured jobs, and the predictions in their order."""

    documents: Sequence[Mapping[str, Any]]
    tables: Sequence[Table]

    def describe(self) -> str:
        """Return it as the text that is shown."""
        first = Measured.of(self.documents[0])
        task, device = (self.documents[0][name] for name in ("task", "device"))
        samples = f"{in_digits(first.samples, 6)} samples of each worker in a step"
        lines = [f"plan: {task} with {device}, {samples}; compression {first.way.name}"]
        for one in map(Measured.of, self.documents):
            step, compute = (each.times(1e3).describe_rounded() for each in (one.step, one.compute))
            lines.append(
                f"  measured {one.workers} workers on {counted(one.hosts, 'host')} over {one.network}: "
                f"step {step} ms, of it computing {compute} ms"
            )
            lines.append(
                f"    its parts explain {in_digits(explained(one).step * 1e3, 3)} ms: ranges are widened by "
                f"{unexplained(one):.0%}"
            )
        lines += [line for table in self.tables for line in table.describe()]
        notes = [text for one in self.documents for text in one["notes"]]
        lines += [f"  note: {text}" for text in dict.fromkeys((*notes, *_NOTES))]
        warnings = [
            f"  warning: over {one['controller']}: {text}"
            for one in self.documents
            for text in one["warnings"]
        ]
        return "\n".join([*lines, *dict.fromkeys(warnings)])

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document; times are in seconds."""
        tables = [table.to_document() for table in self.tables]
        return {
            "version": VERSION,
            "measurements": [{**one, "unexplained": unexplained(Measured.of(one))} for one in self.documents],
            "predictions": [row for rows, _ in tables for row in rows],
            "advice": [advice for _, advice in tables],
        }


def make_plan(documents: Sequence[Mapping[str, Any]], options: PlanOptions) -> Plan:
    """Return the predictions that the options name."""
    tables = []
    for one in documents:
        measured = Measured.of(one)
        slots = options.slots or measured.slots
        check_cluster(measured.hosts, measured.slots, options)
        counts = counts_for(options.hosts, slots, measured_network=measured.hosts > 1)
        has_link = measured.hosts == 1 and counts[-1] > slots
        links: Sequence[Link | None] = options.link or USUAL_LINKS if has_link else (None,)
        for link in links:
            rows = [forecast(measured, Cluster(count, slots, link)) for count in counts]
            tables.append(Table(one, measured, link, rows))
    return Plan(documents, tables)


def check_cluster(hosts: int, slots: int, options: PlanOptions) -> None:
    """Check that what the options name follows from a measurement of so many hosts and workers of each."""
    wanted = options.slots or slots
    if hosts > 1 and options.link is not None:
        problem = f"--link: sums over the network of {hosts} hosts do not show what they take within a host"
        remedy = "Leave --link out to predict for that network, or measure on one host."
    elif wanted > slots or (hosts > 1 and wanted < slots):
        problem = f"--slots {wanted}: {counted(slots, 'worker')} of a host are measured here, which compute "
        problem += "and communicate differently"
        known = f"1 to {slots}" if slots > 1 and hosts == 1 else f"{slots}"
        remedy = f"Give --slots {known} or leave it out, or measure with {wanted} workers of a host."
    elif not counts_for(options.hosts, wanted, measured_network=hosts > 1):
        problem = f"--hosts {options.hosts} with {counted(wanted, 'worker')} each leave nothing to predict"
        remedy = "Give more hosts (--hosts) or more workers of a host (--slots)."
    elif options.hosts == 1 and options.link is not None:
        problem = "--link: with --hosts 1 no message takes a link between hosts"
        remedy = "Give more hosts (--hosts), or leave --link out."
    else:
        return
    raise UsageError(problem, remedy, everywhere=True)
