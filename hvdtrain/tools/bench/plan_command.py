"""The command ``plan``: what more hosts would bring, from a measurement of a few workers."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.horovod_build import installed_build
from hvdtrain.host.launcher import launched_rank, stated_launch
from hvdtrain.host.processes import run_limited
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.start import check_may_be_elastic, settle
from hvdtrain.storage.files import exchange_folder
from hvdtrain.tools.bench.job import Request, bench_job, check_before_launch
from hvdtrain.tools.bench.options import PlanOptions
from hvdtrain.tools.bench.plan_result import check_cluster, make_plan, read_documents
from hvdtrain.tools.bench.sweep import run_job
from hvdtrain.tools.launch import check_slots, horovodrun
from hvdtrain.tools.message_times import bench_module_name
from hvdtrain.tools.output import check_writable, config_files, said_if_interrupted, say, show_found

_PROBE_SECONDS = 120.0
Documents = list[dict[str, Any]]


def run_plan(layers: list[Layer], options: PlanOptions) -> None:
    """Measure, predict, show it, and write it where the options say.

    Under a launcher its workers are measured; without one, jobs on this host are launched.
    """
    check_may_be_elastic(None)
    launch = stated_launch()
    launched = launched_rank() is not None or (launch is not None and launch.size > 1)
    options.check(layers, launched=launched)
    if not launched_rank():
        read = [*config_files(layers), *([options.source] if options.source else [])]
        check_writable(options.json_path, read=read)
    with said_if_interrupted():
        documents = _documents(layers, options, launched=launched)
    if documents:
        plan = make_plan(documents, options)
        show_found(plan.describe(), plan.to_document(), options.json_path)


def _documents(layers: list[Layer], options: PlanOptions, *, launched: bool) -> Documents:
    """Collective under a launcher. Return what was measured; nothing on ranks other than 0."""
    if options.source is not None:
        return read_documents(options.source)
    if launched:
        request = Request(options.train_seconds, plan=True)
        found = bench_job(layers, request, partial(check_hosts, options))
        return [] if found is None else [found]
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
    """Launch a job on this host over each controller.

    There are so many GPUs to compute on; none for a job on the CPU. If one of the jobs fails, what the other
    measured is returned, with a note.
    """
    workers = options.num_proc or gpus or len(os.sched_getaffinity(0))
    _check_places(workers, gpus)
    check_cluster(1, workers, options)
    build = installed_build()
    controllers = ("gloo", "mpi") if build is not None and build.mpi else ("gloo",)
    if options.controller is not None:
        controllers = (options.controller,)
    found: Documents = []
    failures: list[EnvironmentFault] = []
    request = {"seconds": options.train_seconds, "plan": True}
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


def _check_places(workers: int, gpus: int) -> None:
    """Check that there are two workers or more, and a core and, if they have GPUs, one of those for each."""
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
