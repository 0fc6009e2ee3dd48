"""The command ``bench``: one job as it was launched, or a sweep over numbers of workers, launched here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config import Layer
from hvdtrain.host.launcher import check_is_not_launched, launched_rank
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.start import check_may_be_elastic, settle
from hvdtrain.storage.files import exchange_folder
from hvdtrain.storage.text import counted
from hvdtrain.tools.bench.job import (
    VERSION,
    Request,
    bench_job,
    check_before_launch,
    check_rounds,
    describe_job,
    notes_and_warnings,
)
from hvdtrain.tools.bench.options import BenchOptions
from hvdtrain.tools.launch import (
    check_slots,
    horovodrun,
    layers_from_json,
    layers_to_json,
    run_module,
    run_worker,
)
from hvdtrain.tools.message_times import MOST_BYTES
from hvdtrain.tools.output import check_writable, said_if_interrupted, say, show_found
from hvdtrain.tools.spread import Spread, check_picture, draw

_MORE_SECONDS, _FACTOR = 300.0, 10.0  # of a job's limit: to start and to compile; of --seconds


def run_bench(layers: list[Layer], options: BenchOptions) -> None:
    """Measure, show what was found, and write it where the options say."""
    check_may_be_elastic(None)
    options.check()
    if not launched_rank():
        check_writable(options.json_path, options.picture, layers=layers)
        check_picture(options.picture)
    if not options.sweep:
        most = (options.max_bytes or MOST_BYTES) if options.all_reduce else None
        with said_if_interrupted():
            found = bench_job(layers, Request(options.seconds, options.split, most))
        if found is not None:
            show_found(describe_job(found), found, options.json_path)
        return
    check_is_not_launched("bench --sweep")
    with said_if_interrupted():
        swept = run_sweep(layers, options)
    curve = {"measured": [(row["workers"], Spread(**row["efficiency"])) for row in swept["sweep"]]}
    paths = options.json_path, options.picture
    show_found(describe_sweep(swept), swept, *paths, lambda _, path: draw(curve, path))


def run_sweep(layers: list[Layer], options: BenchOptions) -> dict[str, Any]:
    """Launch a job for each number of workers, and return the document of what they found."""
    hosts = check_slots(options.sweep, options.hosts)
    _, config = settle(layers)  # what is wrong is reported before workers are started
    check_rounds(config)
    check_before_launch(config, options.sweep, options.controller)
    request = {"seconds": options.seconds, "splits": options.split, "most_bytes": None}
    documents = []
    with interruptible(), exchange_folder(shared=bool(options.hosts)) as folder:
        for count in options.sweep:
            say(f"{counted(count, 'worker')} ...")
            launcher = horovodrun(count, hosts, options.controller)
            documents.append(run_job(layers, request, launcher, folder, counted(count, "worker")))
    # efficiency is relative to the first one, of the fewest workers
    base = documents[0]["samples_per_second"]["median"] / documents[0]["workers"]
    rows = [
        {
            "workers": one["workers"],
            "samples_per_second": one["samples_per_second"],
            "mean_step_seconds": one["mean_step_seconds"],
            "efficiency": Spread(**one["samples_per_second"]).times(1 / (one["workers"] * base)).to_dict(),
            "jobs": [one],
        }
        for one in documents
    ]
    return {"version": VERSION, "notes": note_on_threads(documents), "sweep": rows}


def run_job(
    layers: list[Layer], request: dict[str, Any], launcher: Sequence[str], folder: Path, workers: str
) -> dict[str, Any]:
    """Launch a job that is measured, and return its document; the request has fields of ``Request``."""
    limit = _FACTOR * request["seconds"] + _MORE_SECONDS
    values = {"layers": layers_to_json(layers), "request": request}
    module = "hvdtrain.tools.bench.sweep"
    document: dict[str, Any] = run_module(f"the job with {workers}", launcher, module, values, folder, limit)
    return document


def work(values: dict[str, Any]) -> dict[str, Any] | None:
    """Collective. Measure a job as values say, and return what was found, on rank 0."""
    return bench_job(layers_from_json(values["layers"]), Request(**values["request"]))


def describe_sweep(document: dict[str, Any]) -> str:
    """Return the text that is shown of a sweep."""
    rows = document["sweep"]
    first = rows[0]["jobs"][0]
    lines = [f"sweep: {first['task']} with {first['device']}"]
    lines.append(f"  {'workers':>7}  {'samples/s':>28}  {'mean step in ms':>24}  efficiency")
    for row in rows:
        speed, step = Spread(**row["samples_per_second"]), Spread(**row["mean_step_seconds"])
        shares = "{:.0%} ({:.0%} to {:.0%})".format(*row["efficiency"].values())
        in_ms = step.times(1e3).describe()
        lines.append(f"  {row['workers']:>7}  {speed.describe(0):>28}  {in_ms:>24}  {shares}")
    lines.append(f"  efficiency: samples/s of a worker, relative to {counted(rows[0]['workers'], 'worker')}")
    return "\n".join([*lines, *notes_and_warnings([*(row["jobs"][0] for row in rows), document])])


def note_on_threads(documents: Sequence[dict[str, Any]]) -> list[str]:
    """Return a note if workers have more threads in some jobs, so that efficiency compares unlike ones."""
    threads = {one["workers"]: one["threads"] for one in documents}
    if not documents[0]["device"].endswith(" on the CPU") or len(set(threads.values())) == 1:
        return []
    given = ", ".join(f"{number} with {counted(count, 'worker')}" for count, number in threads.items())
    return [
        f"a worker has more threads in some jobs ({given}): efficiency compares unlike workers; "
        f"with --set threads={min(filter(None, threads.values()), default=1)} they are alike"
    ]


if __name__ == "__main__":
    run_worker(work)
