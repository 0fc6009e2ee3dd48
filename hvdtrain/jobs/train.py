"""Training: one job, from its configuration to its summary; what every way of starting one goes through."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from hvdtrain.backends.recording import timeline_requested
from hvdtrain.callbacks import Summary
from hvdtrain.config import Layer
from hvdtrain.config.train_options import TrainOptions
from hvdtrain.elastic.watch.liveness import Watching
from hvdtrain.host.cores import peak_bytes
from hvdtrain.host.launcher import muted_console, open_console
from hvdtrain.jobs import outcome
from hvdtrain.jobs.elastic.job import join_elastic_job, train_in_worlds
from hvdtrain.jobs.entering import entered, seed_training, services_open, tool_hooks
from hvdtrain.jobs.failures import Signals, end_if_uncaught, interruptible
from hvdtrain.jobs.opening.setup import TrainingRun, opened
from hvdtrain.jobs.opening.start import prepare, started
from hvdtrain.jobs.plan_text import describe_check, show_plan
from hvdtrain.jobs.resume import ResumePoint, find_start, restore
from hvdtrain.jobs.run_directory.folder import storing
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.loop import run as run_loop
from hvdtrain.task import task_class_of, task_spec
from hvdtrain.workers.agreement import waiting_for_rank_zero
from hvdtrain.workers.seeding import seeded_frameworks


def train(
    task: Any = None,
    *,
    framework: str,
    callbacks: Sequence[Any] = (),
    quiet: bool = False,
    best: bool | str = False,
    **fields: Unpack[TrainOptions],
) -> Summary:
    """Train a task; the same as ``python -m hvdtrain``, from a script that a launcher starts.

    Collective: every worker of the job calls it.

    Args:
        task: the task's class, an instance of it, or its name or path as ``--task`` takes it; the
            built-in task digits if not given.
        framework: "torch" or "tf".
        callbacks: objects that are notified of steps, evaluations and checkpoints, with the task's own;
            see :class:`hvdtrain.Callback`.
        quiet: show nothing on the console. The files of the run directory are written as ever, and errors
            are raised as ever.
        best: of the run that ``init`` names, take the best checkpoint, as ``hvdtrain.evaluate`` does.
        fields: config fields, such as ``epochs=3``; docs/config.md lists them.

    Returns:
        How the run ended, with its ``history`` and the ``best`` values of its metrics: the same on every
        worker.

    Raises:
        Stopped: If a signal stopped training at a step and its state is saved.
        HvdtrainError: as ``hvdtrain.errors`` lists them. One that the script does not catch ends
            it as the command line would: said once among all workers, without a traceback, with
            its exit code. After one that all workers raise, the next call of ``train`` works.
    """
    end_if_uncaught()
    named = {} if task is None else {"task": task_spec(task)}
    given = Layer("train()", {**named, "framework": framework, **fields})
    with muted_console(quiet):
        return run_job([given], task_class_of(task), callbacks, from_python=True, best=best)


def run_job(
    layers: list[Layer],
    task_class: Any = None,
    callbacks: Sequence[Any] = (),
    *,
    from_python: bool = False,
    best: bool | str = False,
) -> Summary:
    """Collective. Resolve the configuration, make the task and train it."""
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers, task_class, best)
        watching = Watching()
        membership = join_elastic_job(job.config, signals, watching)
        tool_hooks(job.config)  # before Horovod starts
        has_profile = job.config.profile is not None
        with (
            RunLock() as lock,
            storing(job.config) as store,
            timeline_requested(has_profile),  # for the whole job: an elastic one starts Horovod many times
            started(job, signals, watching, membership, stays=from_python) as backend,
        ):
            run = replace(opened(job, backend, callbacks), lock=lock, keeps_history=from_python, store=store)
            if membership is not None:
                return train_in_worlds(run, membership, signals, watching)
            return _train(run, signals, watching)


def _train(run: TrainingRun, signals: Signals, watching: Watching) -> Summary:
    """Collective. Train with a fixed number of workers, from where the run starts to its summary."""
    point = find_start(run)
    seed_training(run, point.progress.step)
    with entered(run, point) as (session, found), services_open(run, session, point, signals):
        watching.on_worker_lost = partial(outcome.write_summary_on_loss, session)
        report = partial(outcome.report_early_end, session, signals)
        with outcome.early_end_reported(session, watching.explain, report):
            show_plan(run, session, point, [*filter(None, [watching.note]), *found.notes])
            with signals.signals_take_precedence():
                run_loop(session, outcome.polling(session, signals))
                with waiting_for_rank_zero(run.backend.workers, "writing the last checkpoint"):
                    session.services.saver.finish()
            status, problem = outcome.status_of(session, signals)
        return outcome.end_together(session, outcome.report_end(session, status, problem, signals))


def check_job(layers: list[Layer], task_class: Any = None, best: bool | str = False) -> None:
    """Collective. Do what a job does before its first step, and show what was found."""
    # Nothing is written: the job starts from the beginning of the data, whether it is to resume or not.
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers, task_class, best)
        with started(job, signals) as backend, signals.signals_take_precedence():
            begun_seconds = time.perf_counter()
            run = opened(job, backend, ())
            restore(run.with_config(resume=None))
            with entered(run, ResumePoint(), with_passes=True) as (session, found):
                options = run.notes_on_options(session.plan())
            found = replace(found, notes=(*run.notes(), *found.notes, *options))
            seconds = time.perf_counter() - begun_seconds
            taken = backend.workers.allgather_object(peak_bytes())
            if backend.workers.rank == 0:
                text = describe_check(run, session, found, seconds, max(taken))
                open_console().print(text, highlight=False, markup=False, soft_wrap=True)
