"""The command ``bench``: one job as it was launched, or a sweep over numbers of workers.

In a sweep each number of workers is a job that is launched here.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.config import Layer
from hvdtrain.errors import UsageError
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.host.launcher import check_is_not_launched, launched_rank
from hvdtrain.jobs.opening.setup import check_may_be_elastic, settle
from hvdtrain.jobs.signals import interruptible
from hvdtrain.storage.text import counted
from hvdtrain.tools.bench.job import Request, bench_job, check_before_launch
from hvdtrain.tools.bench.launch import (
    Program,
    exchange_folder,
    horovodrun,
    run_program,
    worker_command,
    write_specification,
)
from hvdtrain.tools.bench.measure import check_rounds
from hvdtrain.tools.bench.message_times import MOST_BYTES
from hvdtrain.tools.bench.options import BenchOptions
from hvdtrain.tools.bench.output import said_if_interrupted, say, show_found
from hvdtrain.tools.bench.picture import check_picture, draw
from hvdtrain.tools.bench.result import VERSION, told
from hvdtrain.tools.bench.spread import Spread
from hvdtrain.tools.bench.worker import layers_to_json

_MORE_SECONDS = 300.0  # beside the measurement: to start, and to compile
_FACTOR = 10.0


@dataclass(frozen=True)
class SweptCount:
    """What was measured with a number of workers.

    Attributes:
        workers: the number.
        documents: what each of the jobs found.
        efficiency: samples/s of a worker, relative to a worker of the smallest number.
    """

    workers: int
    documents: Sequence[dict[str, Any]]
    efficiency: Spread

    @property
    def speed(self) -> Spread:
        """Samples/s of all workers together."""
        return _spread_of("samples_per_second", self.documents)

    @property
    def step(self) -> Spread:
        """Seconds of the mean step, from which the samples/s come."""
        return _spread_of("mean_step_seconds", self.documents)


@dataclass(frozen=True)
class Sweep:
    """What was measured with all numbers of workers."""

    rows: Sequence[SweptCount]

    def describe(self) -> str:
        """Return it as the text that is shown."""
        first = self.rows[0]
        title = f"sweep: {first.documents[0]['task']} with {first.documents[0]['device']}"
        lines = [title, f"  {'workers':>7}  {'samples/s':>28}  {'mean step in ms':>24}  efficiency"]
        for row in self.rows:
            lines.append(
                f"  {row.workers:>7}  {row.speed.describe(0):>28}  {row.step.times(1e3).describe():>24}  "
                f"{row.efficiency.median:.0%} ({row.efficiency.low:.0%} to {row.efficiency.high:.0%})"
            )
        lines.append(f"  efficiency: samples/s of a worker, relative to {counted(first.workers, 'worker')}")
        documents = [document for row in self.rows for document in row.documents]
        notes = [*told(documents, "notes"), *note_on_threads(self.rows)]
        lines += [f"  note: {text}" for text in notes]
        return "\n".join([*lines, *(f"  warning: {text}" for text in told(documents, "warnings"))])

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "version": VERSION,
            "notes": note_on_threads(self.rows),
            "sweep": [
                {
                    "workers": row.workers,
                    "samples_per_second": row.speed.to_dict(),
                    "mean_step_seconds": row.step.to_dict(),
                    "efficiency": row.efficiency.to_dict(),
                    "jobs": list(row.documents),
                }
                for row in self.rows
            ],
        }


def run_bench(layers: list[Layer], options: BenchOptions) -> None:
    """Measure, show what was found, and write it where the options say.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.

    Raises:
        UsageError: If options contradict each other, a launcher started what launches workers itself, or it
            started an elastic job.
        HvdtrainError: as training would raise it.
    """
    check_may_be_elastic(None)
    try:
        options.check()
    except UsageError as error:
        error.everywhere = True  # every worker has the same command
        raise
    if not launched_rank():
        options.check_files(layers)
        if options.picture is not None:
            check_picture(options.picture)
    if not options.sweep:
        most_bytes = options.max_bytes or MOST_BYTES
        request = Request(options.seconds, options.split, options.all_reduce, most_bytes)
        with said_if_interrupted():
            result = bench_job(layers, request)
        if result is not None:
            _show(result.describe(), result.to_document(), options)
        return
    check_is_not_launched("bench --sweep")
    with said_if_interrupted():
        swept = run_sweep(layers, options, say)
    _show(swept.describe(), swept.to_document(), options)


def _show(text: str, document: dict[str, Any], options: BenchOptions) -> None:
    show_found(text, document, options.json_path, options.picture, draw)


def run_sweep(layers: list[Layer], options: BenchOptions, say: Callable[[str], None]) -> Sweep:
    """Launch a job for each number of workers, and return what they found.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.
        say: is called with what is going on.

    Raises:
        UsageError: If there are fewer slots than workers, or the job would be refused.
        EnvironmentFault: If a job fails.
    """
    hosts = check_slots(options.sweep, options.hosts)
    _, config = settle(layers)  # what is wrong is said before workers are started
    check_rounds(config)
    check_before_launch(config, options.sweep, options.controller)
    request = {"seconds": options.seconds, "splits": options.split, "messages": False}
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in options.sweep}
    with interruptible(), exchange_folder(shared=bool(options.hosts)) as folder:
        for turn in range(options.repeat or 1):
            for count in options.sweep:
                say(f"{counted(count, 'worker')} ...")
                path, to = folder / "job.json", folder / f"found-{turn}-{count}.json"
                values = {"layers": layers_to_json(layers), "request": request}
                write_specification(path, {**values, "found": str(to)})
                command = [*horovodrun(count, hosts, options.controller), *worker_command(path)]
                program = Program(f"the job with {counted(count, 'worker')}", [command], limit_of(options))
                found[count].append(run_program(program, to))
    return Sweep(swept_counts(found))


def note_on_threads(rows: Sequence[SweptCount]) -> list[str]:
    """Return a note if workers have more threads in some jobs, so that efficiency compares unlike ones."""
    by_count = {row.workers: row.documents[0].get("threads") for row in rows}
    on_cpu = rows[0].documents[0]["device"].endswith(" on the CPU")
    if not on_cpu or len(set(by_count.values())) == 1:
        return []
    given = ", ".join(f"{threads} with {counted(count, 'worker')}" for count, threads in by_count.items())
    return [
        f"a worker has more threads in some jobs ({given}): efficiency compares unlike workers; "
        f"with --set threads={min(filter(None, by_count.values()), default=1)} they are alike"
    ]


def limit_of(options: BenchOptions) -> float:
    """Return how long a program may take that trains for the time that the options say."""
    return _FACTOR * options.seconds + _MORE_SECONDS


def swept_counts(found: dict[int, list[dict[str, Any]]]) -> list[SweptCount]:
    """Return what jobs found, with the efficiency relative to the smallest number of workers."""
    least = min(found)
    base = _spread_of("samples_per_second", found[least]).median / least
    rows = []
    for count, documents in found.items():
        speed = _spread_of("samples_per_second", documents)
        rows.append(SweptCount(count, documents, speed.times(1 / (count * base))))
    return rows


def check_slots(counts: Sequence[int], hosts: str | None, may_share: bool = True) -> str:
    """Return hosts and slots, as horovodrun takes them.

    Args:
        counts: numbers of workers, the largest last.
        hosts: the user's hosts and slots; None for this host's cores.
        may_share: whether the user may name more slots than cores.

    Raises:
        UsageError: If there are fewer slots than workers.
    """
    if hosts is None:
        slots = len(os.sched_getaffinity(0))
        share = f" To share cores, which makes all slower: -H localhost:{counts[-1]}."
        where, noun, remedy = "this host has", "core", share if may_share else ""
        hosts = f"localhost:{max(slots, 1)}"
    else:
        slots = sum(host.slots for host in parse_host_list(hosts))
        where, noun, remedy = "the hosts of -H have", "slot", " Name more hosts or slots."
    if counts[-1] > slots:
        raise UsageError(
            f"{counted(counts[-1], 'worker')} need a slot each; {where} {counted(slots, noun)}",
            f"Give a smaller number of workers.{remedy}",
        )
    return hosts


def _spread_of(name: str, documents: Sequence[dict[str, Any]]) -> Spread:
    """Return the spread of a figure over jobs; of one job, that over its blocks."""
    if len(documents) == 1:
        return Spread(**documents[0][name])
    return Spread.of([document[name]["median"] for document in documents])
