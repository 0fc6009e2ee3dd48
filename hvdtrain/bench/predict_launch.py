"""Measuring for a plan on this host: one job for each controller and number of workers."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hvdtrain.bench.launch import Program, exchange_folder, horovodrun, run_program, write_specification
from hvdtrain.bench.predict_cluster import check_cluster
from hvdtrain.bench.predict_evidence import Evidence, evidence_of
from hvdtrain.bench.predict_options import PlanOptions
from hvdtrain.bench.predict_record import Record, record_from
from hvdtrain.bench.sweep import check_slots
from hvdtrain.bench.worker import layers_to_json
from hvdtrain.config import Layer
from hvdtrain.doctor.probes import probe
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.horovod_build import installed_build
from hvdtrain.jobs.signals import interruptible

_MORE_SECONDS = 400.0  # beside the training: to start, to compile, and for the sums
_FACTOR = 10.0
_PROBE_SECONDS = 120.0


def count_gpus(framework: str) -> int:
    """Return how many GPUs a framework sees on this host; 0 if it cannot be loaded, which workers say."""
    return len(probe(framework, _PROBE_SECONDS).get("gpus", ()))


def measure_here(
    layers: list[Layer], options: PlanOptions, say: Callable[[str], None], *, gpus: int = 0
) -> list[Evidence]:
    """Launch jobs on this host, over each controller with all workers and with half of them.

    If some of them fail, what the others measured is returned, with a note.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.
        say: is called with what is going on.
        gpus: how many GPUs there are to compute on; 0 for a job on the CPU.

    Raises:
        UsageError: If there are fewer GPUs or cores than workers, or fewer than two workers.
        EnvironmentFault: If no measurement of all workers succeeds.
    """
    workers = options.num_proc or gpus or len(os.sched_getaffinity(0))
    _check_places(workers, gpus)
    check_cluster(1, workers, options)
    build = installed_build()
    controllers = ("gloo", "mpi") if build is not None and build.mpi else ("gloo",)
    if options.controller is not None:
        controllers = (options.controller,)
    found: list[Evidence] = []
    failures: list[EnvironmentFault] = []
    with interruptible(), exchange_folder(shared=False) as folder:
        for controller in controllers:
            records: list[Record] = []
            for count in [workers, *([workers // 2] if workers >= 4 else [])]:
                say(f"measuring {count} workers over {controller} ...")
                program, to = _job(layers, options, folder, controller, count)
                try:
                    records.append(record_from(run_program(program, to)))
                except EnvironmentFault as error:
                    say(str(error))
                    failures.append(error)
                    break
            if records:
                found.append(evidence_of(*records))
    if not found:
        raise failures[0]
    failed = [f"left out: {error.problem}" for error in failures]
    first = replace(found[0].record, notes=[*found[0].record.notes, *failed])
    return [replace(found[0], record=first), *found[1:]]


def _job(
    layers: list[Layer], options: PlanOptions, folder: Path, controller: str, count: int
) -> tuple[Program, Path]:
    """Return a job that measures, and the file in which it writes what it found."""
    path, to = (folder / f"{name}-{controller}-{count}.json" for name in ("job", "found"))
    write_specification(
        path, {"layers": layers_to_json(layers), "seconds": options.train_seconds, "found": str(to)}
    )
    launcher = horovodrun(count, f"localhost:{count}", controller)
    command = [*launcher, sys.executable, "-m", "hvdtrain.bench.predict_worker", str(path)]
    limit = _FACTOR * options.train_seconds + _MORE_SECONDS
    return Program(f"the job with {count} workers over {controller}", [command], limit), to


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
