"""Tuning a job on this host: its runs are launched here."""

from collections.abc import Callable
from typing import Any

from hvdtrain.bench.launch import (
    Program,
    exchange_folder,
    horovodrun,
    run_program,
    worker_command,
    write_specification,
)
from hvdtrain.bench.options import BenchOptions
from hvdtrain.bench.sweep import check_slots, limit_of
from hvdtrain.bench.tune import REPEAT, settings_to_try, tune
from hvdtrain.bench.tuning import Setting, Tuning, merged
from hvdtrain.bench.worker import HVDTRAIN, layers_to_json
from hvdtrain.config import Layer
from hvdtrain.errors import UsageError
from hvdtrain.horovod_build import installed_build
from hvdtrain.jobs.signals import interruptible

_WORKERS = 2


def run_tune(layers: list[Layer], options: BenchOptions, say: Callable[[str], None]) -> Tuning:
    """Run a job with several settings, and return what came out best.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.
        say: is called with what is going on.

    Raises:
        UsageError: If no framework is given, or there are fewer cores than workers.
        EnvironmentFault: If the job fails as it is.
    """
    given = merged(layers)
    if not given.get("framework"):
        raise UsageError("no framework is given", "Add --framework torch or --framework tf.")
    workers = options.num_proc or _WORKERS
    check_slots((workers,), None, may_share=False)
    build = installed_build()
    tries = settings_to_try(workers, bool(build and build.mpi), given, options.controller)
    with interruptible(), exchange_folder(shared=False) as folder:
        runs = [0]

        def measure(setting: Setting) -> dict[str, Any]:
            runs[0] += 1
            path, found = (folder / f"{name}-{runs[0]}.json" for name in ("job", "found"))
            request = {"seconds": options.seconds, "splits": False, "messages": False}
            values = {"program": HVDTRAIN, "request": request, "found": str(found)}
            together = [*layers, Layer("--tune", dict(setting.fields))]
            write_specification(path, {**values, "layers": layers_to_json(together)})
            launcher = horovodrun(workers, f"localhost:{workers}", setting.controller)
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
            say=say,
        )
