"""``--check``: everything up to the first step, and a summary of what the dry run has found."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hvdtrain.backends.base import Backend, device_memory
from hvdtrain.backends.memory import MemoryPlan, mebibytes
from hvdtrain.config import Layer
from hvdtrain.host.cores import peak_bytes
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs.entering import entered
from hvdtrain.jobs.opening.dry_run import Dry
from hvdtrain.jobs.opening.dry_run_checks import Pass
from hvdtrain.jobs.opening.limits import check_batches, notes_on_options
from hvdtrain.jobs.opening.memory_check import memory_limit
from hvdtrain.jobs.opening.setup import TrainingRun, opened
from hvdtrain.jobs.opening.start import prepare, started
from hvdtrain.jobs.plan_text import describe_model, describe_stages
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.jobs.signals import interruptible
from hvdtrain.storage.text import counted
from hvdtrain.training_plan import Progress
from hvdtrain.workers.seeding import seeded_frameworks

_WIDTH = 11


def check_job(layers: list[Layer], task_class: Any = None) -> None:
    """Collective. Do what a job does before its first step, and show what was found.

    Nothing is written: the job starts from the beginning of the data, whether it is to resume or not.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        task_class: the task's class if the caller has it; found by its name otherwise.

    Raises:
        HvdtrainError: as training would raise it.
    """
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers, task_class)
        with started(job, signals) as backend, signals.signals_take_precedence():
            begun_seconds = time.perf_counter()
            run = opened(job, backend, (), RunLock())
            config, task_data = run.config, run.task_data
            checked = check_batches(backend.workers, task_data.identity, config, Progress())
            restore(config.model_copy(update={"resume": None}), backend, len(task_data.train_data))
            with entered(run, ResumePoint()) as (session, found):
                options = notes_on_options(
                    config,
                    job.given,
                    session.plan(),
                    own_optimizer=run.model.own_rates is not None,
                    has_eval_data=task_data.eval_data is not None,
                )
            notes = (*job.notes, *run.model.notes, *task_data.notes, *task_data.identity.notes, *checked)
            found = replace(found, notes=(*notes, *found.notes, *options))
            seconds = time.perf_counter() - begun_seconds
            taken = backend.workers.allgather_object(peak_bytes())
            if backend.workers.rank == 0:
                assert session.memory.heaviest is not None  # the dry run has measured it
                text = _describe(run, found, session.memory.heaviest, seconds=seconds, peak=max(taken))
                open_console().print(text, highlight=False, markup=False, soft_wrap=True)


def _describe(run: TrainingRun, found: Dry, memory: MemoryPlan, *, seconds: float, peak: int) -> str:
    config, backend, model = run.config, run.backend, run.model
    workers = counted(backend.workers.size, "worker")
    lines = [("model", describe_model(model))]
    split = describe_stages(config, backend.workers.size, model.stages)
    lines += [("" if number else "stages", line) for number, line in enumerate(split.splitlines())]
    lines += [line for one in found.passes for line in _describe_pass(one)]
    lines += [
        ("memory", memory.describe()),
        ("", f"the largest worker has had {mebibytes(peak)} of the host's until now, all included"),
        ("", _limit(backend)),
        ("time", f"{found.seconds:.2f} s for the dry run, {seconds:.2f} s with data and model"),
        *(("note", note) for note in found.notes),
    ]
    title = f"check passed: {config.task} with {backend.info.description}, {workers}; nothing was trained"
    return "\n".join([title, *(f"  {name:<{_WIDTH}} {text}" for name, text in lines)])


def _limit(backend: Backend) -> str:
    """Return how much memory each worker has, in words."""
    limit = memory_limit(backend)
    if device_memory(backend) is None:
        return f"each worker of this host may take {mebibytes(limit or 0)}"
    return "how much memory a GPU has is not known" if limit is None else f"a GPU has {mebibytes(limit)}"


def _describe_pass(one: Pass) -> Iterator[tuple[str, str]]:
    """Yield the lines of a data set: its first micro-batch on rank 0."""
    name = one.what.removesuffix(" data").removeprefix("evaluation set ").strip("'")
    values = ", ".join(f"{metric} {value:.4f}" for metric, value in one.means().items())
    yield name, one.describe_data()
    if outputs := one.describe_outputs():
        yield "", f"outputs {outputs}"
    yield "", values
