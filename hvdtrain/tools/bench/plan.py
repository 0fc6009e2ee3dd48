"""The command ``plan``: what more hosts would bring, from a measurement of a few workers."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.horovod_build.installed import installed_build
from hvdtrain.host.launcher import launched_rank, stated_launch
from hvdtrain.host.processes import run_limited
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.start import check_may_be_elastic, settle
from hvdtrain.storage.files import exchange_folder
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
from hvdtrain.tools.bench.job import Request, bench_job, check_before_launch
from hvdtrain.tools.bench.options import USUAL_LINKS, Link, PlanOptions
from hvdtrain.tools.bench.sweep import run_job
from hvdtrain.tools.launch import check_slots, horovodrun
from hvdtrain.tools.message_times import bench_module_name
from hvdtrain.tools.output import check_writable, said_if_interrupted, say, show_found
from hvdtrain.tools.spread import check_picture, draw, in_digits

VERSION = 4  # of the documents
_PROBE_SECONDS = 120.0
_GOOD = 0.9  # of a step, what computing takes if nothing limits a job
_HEAD = ("workers", "hosts", "samples/s", "efficiency", *PART_NAMES)
_NOTES = (
    "efficiency is relative to workers of full hosts that wait for nobody; likely parts of a step are in ms",
    "not predicted: hosts that differ, and how many samples a training needs (`hvdtrain docs scaling`)",
)
_LIMITS: dict[str, tuple[str, list[str]]] = {  # by the part: what it is, and what helps
    "data": ("waiting for data", ["more reader processes (--read-workers)"]),
    "slowest": (
        "waiting for the slowest worker",
        ["idle hosts that are alike (python -m hvdtrain doctor)", "a larger batch or --accumulate"],
    ),
    "latency": (
        "latency: small messages one after the other",
        ["--accumulate or --sync-every", "MPI in place of Gloo", "more workers on each of fewer hosts"],
    ),
    "transfer": (
        "bandwidth",
        ["a larger batch or --accumulate", "--compression or --sync-every", "a faster link"],
    ),
    "rest": ("copies and other work of the exchange", ["a larger batch or --accumulate"]),
}
Documents = list[dict[str, Any]]


def run_plan(layers: list[Layer], options: PlanOptions) -> None:
    """Measure the launcher's workers, or jobs that are launched on this host; predict, show and write it."""
    check_may_be_elastic(None)
    launch = stated_launch()
    launched = launched_rank() is not None or (launch is not None and launch.size > 1)
    for name, value in (("-np", options.num_proc), ("--controller", options.controller)):
        if value is not None and launched:
            raise UsageError(
                f"{name} is for jobs that plan launches itself",
                "Give it to the launcher, or run plan without a launcher.",
                everywhere=True,
            )
    if not launched_rank():
        check_writable(options.json_path, options.picture, layers=layers)
        check_picture(options.picture)
    documents: Documents = []
    with said_if_interrupted():
        if not launched:
            documents = _launched_here(layers, options)
        elif found := bench_job(layers, Request(options.seconds, plan=True), partial(check_hosts, options)):
            documents = [found]
    if documents:
        plan, paths = make_plan(documents, options), (options.json_path, options.picture)
        tables = plan.tables
        curves = {one.title: [(row.cluster.workers, row.efficiency) for row in one.rows] for one in tables}
        show_found(plan.describe(), plan.to_document(), *paths, lambda _, path: draw(curves, path))


def _launched_here(layers: list[Layer], options: PlanOptions) -> Documents:
    """Check what is launched here, and return what was measured."""
    if not any(layer.values.get("framework") for layer in layers):
        raise UsageError("no framework is given", "Add --framework torch or --framework tf.")
    task_class, config = settle(layers)  # what is wrong is reported before workers are started
    check(Job(config, task_class, command="plan"))
    check_before_launch(config, (), options.controller, command="plan")
    return measure_here(layers, options, gpus=0 if config.device == "cpu" else count_gpus(config.framework))


def check_hosts(options: PlanOptions, hosts: Sequence[str], local_sizes: Sequence[int]) -> None:
    """Check that there are several workers, as many on all hosts, and that hosts have names of their own."""
    counts = Counter(hosts)
    if len(hosts) < 2:
        problem = "a plan is computed from sums over two workers or more, and this job has one"
        remedy = "Start more, for example: horovodrun -np 2 python -m hvdtrain plan ..."
    elif any(counts[host] != size for host, size in zip(hosts, local_sizes, strict=True)):
        problem = f"hosts have the same name ({', '.join(counts)}), so which workers share one is unknown"
        remedy = "Give each host a hostname of its own."
    elif len(set(counts.values())) > 1:
        given = ",".join(f"{host}:{number}" for host, number in counts.items())
        problem = f"hosts with different numbers of workers ({given}); a plan takes all hosts to be alike"
        alike = ",".join(f"{host}:{min(counts.values())}" for host in counts)
        remedy = f"Start as many on each, for example: -H {alike}"
    else:
        check_cluster(len(counts), max(counts.values()), options)
        return
    raise UsageError(problem, remedy, everywhere=True)


def count_gpus(framework: str) -> int:
    """Return how many GPUs a framework sees on this host; 0 if it cannot be loaded, which workers report."""
    code = f"from {bench_module_name(framework)} import count_gpus; print(count_gpus())"
    ended = run_limited([sys.executable, "-c", code], _PROBE_SECONDS)
    return int(ended.output.split()[-1]) if ended.code == 0 and ended.output.split() else 0


def measure_here(layers: list[Layer], options: PlanOptions, *, gpus: int = 0) -> Documents:
    """Launch a job on this host over each controller; what one measured counts if the other fails."""
    workers = options.num_proc or gpus or len(os.sched_getaffinity(0))
    if workers < 2:
        places, more, cpu = ("GPU", "GPUs", ", with --device cpu") if gpus else ("core", "cores", "")
        raise UsageError(
            f"a plan is computed from sums over two workers or more, and this host has one {places}",
            f"Plan on a host with more {more}{cpu}, or on several hosts: horovodrun -np 2 -H host1:1,host2:1 "
            "python -m hvdtrain plan ...",
        )
    if 0 < gpus < workers:
        raise UsageError(
            f"{workers} workers need a GPU each; this host has {gpus}",
            "Give fewer workers (-np), two at least, or --device cpu.",
        )
    check_slots((workers,), None)
    check_cluster(1, workers, options)
    build = installed_build()
    controllers = ("gloo", "mpi") if build is not None and build.mpi else ("gloo",)
    if options.controller is not None:
        controllers = (options.controller,)
    found: Documents = []
    failures: list[EnvironmentFault] = []
    request = {"seconds": options.seconds, "plan": True}
    with interruptible(), exchange_folder(shared=False) as folder:
        for controller in controllers:
            name = f"{workers} workers over {controller}"
            say(f"measuring {name} ...")
            launcher = horovodrun(workers, f"localhost:{workers}", controller)
            try:
                found.append(run_job(layers, request, launcher, folder, name))
            except EnvironmentFault as error:
                say(str(error))
                failures.append(error)
    if not found:
        raise failures[0]
    for one in found:
        one["notes"] += [f"left out: {error.problem}" for error in failures]
    return found


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


@dataclass(frozen=True)
class Table:
    """Predictions over a controller and a link, from few to many workers; no link is the measured network."""

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
        """The part but for computing that takes most of the largest job's step, and its share of it."""
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
        said = "limited by nothing: workers compute for nearly all of a step"
        if name:
            limit, helps = _LIMITS[name]
            said = f"limited by {limit}, {share:.0%} of a step; what helps: {', '.join(helps)}"
        return [f"  {self.title}{busy}", *lines, f"    {self.rows[-1].cluster.workers} workers: {said}"]

    def to_document(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return its predictions and its advice for the JSON document."""
        name, share = self.limit
        limit, helps = _LIMITS.get(name, ("", []))
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
        return rows, {**of, "workers": workers, "limit": limit, "share": share, "helps": helps}


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
            lines += [
                f"  measured {one.workers} workers on {counted(one.hosts, 'host')} over {one.network}: "
                f"step {step} ms, of it computing {compute} ms",
                f"    its parts explain {in_digits(explained(one).step * 1e3, 3)} ms: ranges are widened by "
                f"{unexplained(one):.0%}",
            ]
        lines += [line for table in self.tables for line in table.describe()]
        notes = [text for one in self.documents for text in one["notes"]]
        lines += [f"  note: {text}" for text in dict.fromkeys((*notes, *_NOTES))]
        warnings = ((one["controller"], text) for one in self.documents for text in one["warnings"])
        lines += [f"  warning: over {name}: {text}" for name, text in dict.fromkeys(warnings)]
        return "\n".join(lines)

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
