"""Measuring for a plan on this host: one job for each controller and number of workers."""

import os
import sys
from collections.abc import Callable

from hvdtrain.bench.launch import Program, exchange_folder, horovodrun, run_program, write_specification
from hvdtrain.bench.predict_cluster import check_cluster
from hvdtrain.bench.predict_evidence import Evidence, evidence_of
from hvdtrain.bench.predict_options import PlanOptions
from hvdtrain.bench.predict_record import record_from
from hvdtrain.bench.sweep import check_slots
from hvdtrain.bench.worker import layers_to_json
from hvdtrain.config import Layer
from hvdtrain.errors import UsageError
from hvdtrain.horovod_build import installed_build
from hvdtrain.jobs.signals import interruptible

_MORE_SECONDS = 400.0  # beside the training: to start, to compile, and for the sums
_FACTOR = 10.0


def measure_here(layers: list[Layer], options: PlanOptions, say: Callable[[str], None]) -> list[Evidence]:
    """Launch jobs on this host, over each controller with all workers and with half of them.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.
        say: is called with what is going on.

    Raises:
        UsageError: If there are fewer cores than workers, or fewer than two workers.
        EnvironmentFault: If a job fails.
    """
    workers = options.num_proc or len(os.sched_getaffinity(0))
    if workers < 2:
        raise UsageError(
            "a plan is computed from sums over two workers or more, and this host has one core",
            "Plan on a host with more cores, or on several hosts: horovodrun -np 2 -H host1:1,host2:1 "
            "python -m hvdtrain plan ...",
        )
    check_slots((workers,), None)
    check_cluster(1, workers, options)
    build = installed_build()
    controllers = ("gloo", "mpi") if build is not None and build.mpi else ("gloo",)
    counts = [workers, *([workers // 2] if workers >= 4 else [])]
    found = []
    with interruptible(), exchange_folder(shared=False) as folder:
        for controller in controllers if options.controller is None else (options.controller,):
            records = []
            for count in counts:
                say(f"measuring {count} workers over {controller} ...")
                path, to = (folder / f"{name}-{controller}-{count}.json" for name in ("job", "found"))
                write_specification(
                    path, {"layers": layers_to_json(layers), "seconds": options.seconds, "found": str(to)}
                )
                launcher = horovodrun(count, f"localhost:{count}", controller)
                command = [*launcher, sys.executable, "-m", "hvdtrain.bench.predict_worker", str(path)]
                limit = _FACTOR * options.seconds + _MORE_SECONDS
                program = Program(f"the job with {count} workers over {controller}", [command], limit)
                records.append(record_from(run_program(program, to)))
            found.append(evidence_of(*records))
    return found
