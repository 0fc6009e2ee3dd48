"""Tuning a job: its runs are launched here."""

from collections.abc import Callable
from typing import Any

from hvdtrain.bench.before_launch import check_before_launch
from hvdtrain.bench.launch import (
    Program,
    exchange_folder,
    horovodrun,
    run_program,
    worker_command,
    write_specification,
)
from hvdtrain.bench.measure import check_rounds
from hvdtrain.bench.options import BenchOptions
from hvdtrain.bench.sweep import check_slots, limit_of
from hvdtrain.bench.tune import REPEAT, settings_to_try, tune
from hvdtrain.bench.tuning import Setting, Tuning, merged
from hvdtrain.bench.worker import HVDTRAIN, layers_to_json
from hvdtrain.config import Layer
from hvdtrain.errors import UsageError
from hvdtrain.horovod_build import installed_build
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.jobs.setup import settle
from hvdtrain.jobs.signals import interruptible
from hvdtrain.words import counted

_WORKERS = 2


def run_tune(layers: list[Layer], options: BenchOptions, say: Callable[[str], None]) -> Tuning:
    """Run a job with several settings, on this host or on those of -H, and return what came out best.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.
        say: is called with what is going on.

    Raises:
        UsageError: If no framework is given, there are fewer cores or slots than workers, or the job would
            be refused.
        EnvironmentFault: If the job fails as it is.
    """
    given = merged(layers)
    if not given.get("framework"):
        raise UsageError("no framework is given", "Add --framework torch or --framework tf.")
    all_slots = sum(host.slots for host in parse_host_list(options.hosts)) if options.hosts else _WORKERS
    workers = options.num_proc or all_slots
    slots = check_slots((workers,), options.hosts, may_share=False)
    _, config = settle(layers)  # what is wrong is said before workers are started
    check_rounds(config)
    check_before_launch(config, (workers,), options.controller)
    hosts = slots if options.hosts else f"localhost:{workers}"
    on_hosts = _filled(workers, hosts)
    if options.hosts:
        say(f"{counted(workers, 'worker')} on {counted(len(on_hosts), 'host')}")
    tries = settings_to_try(on_hosts, installed_build(), given, options.controller)
    with interruptible(), exchange_folder(shared=bool(options.hosts)) as folder:
        runs = [0]

        def measure(setting: Setting) -> dict[str, Any]:
            runs[0] += 1
            path, found = (folder / f"{name}-{runs[0]}.json" for name in ("job", "found"))
            request = {"seconds": options.seconds, "splits": False, "messages": False}
            values = {"program": HVDTRAIN, "request": request, "found": str(found)}
            together = [*layers, Layer("--tune", dict(setting.fields))]
            write_specification(path, {**values, "layers": layers_to_json(together)})
            launcher = horovodrun(workers, hosts, setting.controller)
            command = [*launcher, *worker_command(path)]
            program = Program("the job", [command], limit_of(options), setting.environ)
            document: dict[str, Any] = run_program(program, found)
            return document

        return tune(
            layers,
            tries,
            measure,
            workers=workers,
            start=Setting(controller=options.controller),
            repeat=options.repeat or REPEAT,
            hosts=options.hosts,
            say=say,
        )


def _filled(workers: int, hosts: str) -> list[int]:
    """Return how many workers are on each host that has any: hosts fill one after the other."""
    found = []
    for host in parse_host_list(hosts):
        found.append(min(host.slots, workers))
        workers -= found[-1]
    return [count for count in found if count]
