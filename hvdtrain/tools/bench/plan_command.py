"""The command ``plan``: what more hosts would bring, from a measurement of a few workers."""

import os
import subprocess
import sys
from dataclasses import replace

from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.horovod_build import installed_build
from hvdtrain.host.launcher import launched_rank, stated_launch
from hvdtrain.jobs.compatibility import check
from hvdtrain.jobs.features import Job
from hvdtrain.jobs.opening.setup import check_may_be_elastic, settle
from hvdtrain.jobs.signals import interruptible
from hvdtrain.tools.bench.job import check_before_launch
from hvdtrain.tools.bench.launch import (
    Program,
    exchange_folder,
    horovodrun,
    run_program,
    write_specification,
)
from hvdtrain.tools.bench.message_times import bench_module_name
from hvdtrain.tools.bench.output import said_if_interrupted, say, show_found
from hvdtrain.tools.bench.picture import check_picture, draw
from hvdtrain.tools.bench.plan_options import PlanOptions
from hvdtrain.tools.bench.plan_result import Record, make_plan, read_records
from hvdtrain.tools.bench.plan_scope import check_cluster
from hvdtrain.tools.bench.sweep import check_slots
from hvdtrain.tools.bench.worker import layers_to_json

_MORE_SECONDS = 400.0  # in addition to the training: to start, to compile, and for the sums
_FACTOR = 10.0
_PROBE_SECONDS = 120.0


def run_plan(layers: list[Layer], options: PlanOptions) -> None:
    """Measure, predict, show it, and write it where the options say.

    Under a launcher its workers are measured; without one, jobs on this host are launched.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.

    Raises:
        UsageError: If options contradict each other, the job has what a plan does not predict, or the
            launcher started an elastic job.
        EnvironmentFault: If a file cannot be written.
        HvdtrainError: as training would raise it.
    """
    check_may_be_elastic(None)
    launch = stated_launch()
    launched = launched_rank() is not None or (launch is not None and launch.size > 1)
    options.check(launched=launched)
    if not launched_rank():
        options.check_files(layers)
        if options.picture is not None:
            check_picture(options.picture)
    with said_if_interrupted():
        records = _records(layers, options, launched=launched)
    if not records:
        return
    plan = make_plan(records, options)
    show_found(plan.describe(), plan.to_document(), options.json_path, options.picture, draw)


def _records(layers: list[Layer], options: PlanOptions, *, launched: bool) -> list[Record]:
    """Collective under a launcher. Return the measurements; none on ranks other than 0."""
    if options.source is not None:
        if given := sorted({name for layer in layers for name in layer.values}):
            raise UsageError(
                f"--from {options.source}: the job is measured: {', '.join(given)} cannot be changed",
                "Leave the options of the job out, or measure again without --from.",
            )
        return read_records(options.source)
    if launched:
        from hvdtrain.tools.bench.plan_measure import measure_job

        record = measure_job(
            layers, options.train_seconds, lambda hosts, slots: check_cluster(hosts, slots, options)
        )
        return [] if record is None else [record]
    if not any(layer.values.get("framework") for layer in layers):
        raise UsageError("no framework is given", "Add --framework torch or --framework tf.")
    task_class, config = settle(layers)  # what is wrong is reported before workers are started
    check(Job(config, task_class, command="plan"))
    check_before_launch(config, (), options.controller)
    gpus = 0 if config.device == "cpu" else count_gpus(config.framework)
    return measure_here(layers, options, gpus=gpus)


def count_gpus(framework: str) -> int:
    """Return how many GPUs a framework sees on this host; 0 if it cannot be loaded, which workers report."""
    code = f"from {bench_module_name(framework)} import count_gpus; print(count_gpus())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True
        )
        return int(done.stdout.split()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return 0


def measure_here(layers: list[Layer], options: PlanOptions, *, gpus: int = 0) -> list[Record]:
    """Launch a job on this host over each controller.

    If one of them fails, what the other measured is returned, with a note.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.
        gpus: how many GPUs there are to compute on; 0 for a job on the CPU.

    Raises:
        UsageError: If there are fewer GPUs or cores than workers, or fewer than two workers.
        EnvironmentFault: If no job succeeds.
    """
    workers = options.num_proc or gpus or len(os.sched_getaffinity(0))
    _check_places(workers, gpus)
    check_cluster(1, workers, options)
    build = installed_build()
    controllers = ("gloo", "mpi") if build is not None and build.mpi else ("gloo",)
    if options.controller is not None:
        controllers = (options.controller,)
    found: list[Record] = []
    failures: list[EnvironmentFault] = []
    with interruptible(), exchange_folder(shared=False) as folder:
        for controller in controllers:
            say(f"measuring {workers} workers over {controller} ...")
            job, to = folder / "job.json", folder / f"found-{controller}.json"
            values = {"layers": layers_to_json(layers), "seconds": options.train_seconds, "found": str(to)}
            write_specification(job, values)
            launcher = horovodrun(workers, f"localhost:{workers}", controller)
            command = [*launcher, sys.executable, "-m", "hvdtrain.tools.bench.plan_measure", str(job)]
            limit = _FACTOR * options.train_seconds + _MORE_SECONDS
            name = f"the job with {workers} workers over {controller}"
            try:
                found.append(Record.from_document(run_program(Program(name, [command], limit), to)))
            except EnvironmentFault as error:
                say(str(error))
                failures.append(error)
    if not found:
        raise failures[0]
    failed = [f"left out: {error.problem}" for error in failures]
    return [replace(one, notes=[*one.notes, *failed]) for one in found]


def _check_places(workers: int, gpus: int) -> None:
    """Check that there are two workers or more, and a core and, if they have GPUs, one of those for each.

    Raises:
        UsageError: If not.
    """
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
