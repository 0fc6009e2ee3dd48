"""One job, from its configuration to its summary: what every way of starting one goes through."""

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from hvdtrain.backends.base import Backend, Requests
from hvdtrain.checkpoint import newest_verified
from hvdtrain.cluster import on_root
from hvdtrain.config import Layer
from hvdtrain.ending import Signals, end_if_uncaught, interruptible
from hvdtrain.errors import (
    HvdtrainError,
    Interrupted,
    SaveError,
    Stopped,
    WorkerFailure,
)
from hvdtrain.loop import run
from hvdtrain.metrics import Window
from hvdtrain.opening import Job, Material, open_together, prepare, started
from hvdtrain.patience import waiting_from
from hvdtrain.plan import plan_in_words
from hvdtrain.rundir import CHECKPOINTS, open_run
from hvdtrain.saving import BackgroundSaver
from hvdtrain.session import Session, readers_for
from hvdtrain.starting import Start, find_start, with_nan
from hvdtrain.summary import Summary
from hvdtrain.task import task_spec, where_raised
from hvdtrain.watch import Watching

_LAST_SAVE_SECONDS = 30  # how long a worker that ends early waits for the checkpoint being written
_LOST_SAVE_SECONDS = 10  # likewise where a host is gone


def train(task: Any = "digits", *, framework: str, **fields: Any) -> Summary:
    """Train a task; the same as ``python -m hvdtrain``, from a script that a launcher starts.

    Collective: every worker of the job calls it.

    Args:
        task: the task's class, or its name or path as ``--task`` takes it.
        framework: "torch" or "tf".
        fields: config fields, such as ``epochs=3``; docs/config.md lists them.

    Returns:
        How the run ended.

    Raises:
        Stopped: where a signal stopped training at a step and its state is saved.
        HvdtrainError: as ``hvdtrain.errors`` lists them. One that the script does not catch ends
            it as the command line would: said once among all workers, without a traceback, with
            its exit code.
    """
    end_if_uncaught()
    given = Layer("train()", {"task": task_spec(task), "framework": framework, **fields})
    return run_job([given], None if isinstance(task, str) else task)


def run_job(layers: list[Layer], task_class: Any = None) -> Summary:
    """Resolve the configuration, make the task and train it.

    Collective.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        task_class: the task's class where the caller has it; found by its name otherwise.
    """
    with interruptible() as signals:
        job = prepare(layers, task_class)
        watching = Watching()
        with started(job, signals, watching) as backend:
            return _train(job, backend, signals, watching)


def _train(job: Job, backend: Backend, signals: Signals, watching: Watching) -> Summary:
    """Collective. Agree, build, take up where a checkpoint stands, train."""
    material, hosts = open_together(job, backend)
    with readers_for(job.config, material.train_data, material.eval_data) as readers:
        start = on_root(backend.workers, lambda: find_start(job.config, backend, len(material.train_data)))
        session = _open_session(job, backend, material, start)
        session.readers = readers
        watching.last_words = partial(_write_last_words, session)
        start = replace(start, notes=(*start.notes, *filter(None, [watching.note])))
        with signals.at_a_step():
            return _train_session(job, session, start, hosts, task=material.task, signals=signals)


def _train_session(
    job: Job, session: Session, start: Start, hosts: list[str], *, task: Any, signals: Signals
) -> Summary:
    """Collective. Train, and say how it ended."""
    backend = session.backend
    status, problem, in_order = "failed", None, False
    try:
        backend.broadcast_state(0)
        _say_plan(job, session, start, hosts, task)
        with signals.go_first():
            run(session, _asking(session, signals))
            session.saver.finish()
        status, problem = _status(session, signals)
        in_order = True
    except Interrupted as interruption:
        status, problem = "stopped", f"interrupted by {interruption}"
        newest = session.saver.newest
        goes_on = f"; --resume goes on from {newest.name}" if newest else ""
        session.report.say(f"{problem} {_where_it_stood(session)}{goes_on}")
        raise
    except HvdtrainError as error:
        problem = error.problem
        raise
    except Exception as error:
        problem = f"training failed {_where_it_stood(session)}: {where_raised(error)}"
        raise WorkerFailure(problem) from error
    finally:
        summary = _summarise(session, status, problem, verified=in_order)
        session.report.finish(summary)
        session.saver.finish(_LAST_SAVE_SECONDS)
        session.report.close()  # last: what is being written waits for the log to be on the disk
    return _end_together(session, summary)


def _write_last_words(session: Session, problem: str) -> None:
    """Write how the run stands before the process ends without its main thread."""
    session.saver.finish(_LOST_SAVE_SECONDS)
    session.report.write_summary(_summarise(session, "failed", problem))


def _open_session(job: Job, backend: Backend, material: Material, start: Start) -> Session:
    """Collective. Open the run directory and put together what the loop is given."""
    config = job.config
    report, run_dir = open_run(config, backend.workers, start.resumed_step)
    session = Session(
        config, backend, material.train_data, material.eval_data, report, run_dir, progress=start.progress
    )
    if backend.workers.rank == 0:
        session.saver = BackgroundSaver(
            run_dir / CHECKPOINTS,
            report,
            keep_last=config.keep_last,
            best=config.keep_best,
            stop_on_error=config.on_save_error == "stop",
            newest=start.newest,
            values=start.values,
        )
    session.best_value = start.best_value(config)
    session.waiting = waiting_from(config.early_stopping, start.record.waiting if start.record else None)
    if (record := start.record) is not None:
        session.seconds_before = record.seconds
        session.last_eval = with_nan(record.last_metrics)
        session.last_eval_step = record.step if record.metrics else None
        weight = record.window_weight
        session.window = Window(with_nan(record.window), weight, untimed_weight=weight)
    return session


def _say_plan(job: Job, session: Session, start: Start, hosts: list[str], task: Any) -> None:
    plan = plan_in_words(
        session,
        session.layout(),
        hosts=hosts,
        build=job.build,
        settings=job.settings,
        own_optimizer=hasattr(task, f"{job.config.framework}_optimizer"),
        start=start,
        found=str(task.describe()) if hasattr(task, "describe") else "",
    )
    session.report.say(plan)
    for note in start.notes:
        session.report.note(note)


def _asking(session: Session, signals: Signals) -> Callable[[], Requests]:
    """Give what the loop asks at every step: what signals asked of this worker.

    A request to stop is told, and the summary written, at once: a launcher may leave the workers less
    time than a step and a save take, as mpirun does after Ctrl-C.
    """
    told = False

    def asked() -> Requests:
        nonlocal told
        requests = signals.requests()
        if requests.stop and not told:
            told = True
            why = f"{signal.Signals(signals.number or 0).name} came"
            session.report.say(f"{why} {_where_it_stood(session)}; stopping after this step")
            session.report.write_summary(_summarise(session, "stopped", why))
        return requests

    return asked


def _status(session: Session, signals: Signals) -> tuple[str, str | None]:
    """Collective. Give how training ended, as all workers see it, and why if not by itself."""
    why = None
    if session.saver.poll():
        why = "a checkpoint could not be written, and on_save_error is stop"
    elif session.stopped and signals.number is not None:
        why = f"{signal.Signals(signals.number).name} came"
    reasons = session.backend.workers.allgather_object(why)
    why = next((reason for reason in reasons if reason), None)
    if session.stopped:
        session.report.say(f"stopped {_where_it_stood(session)}: {why}")
    return ("stopped" if session.stopped else "completed"), why


def _end_together(session: Session, summary: Summary) -> Summary:
    """Collective. Give rank 0's summary, or raise on all workers where training did not complete.

    Raises:
        Stopped: where a later job can go on from a checkpoint.
        SaveError: where there is none, or the config wants it to be an error.
    """
    summary = session.backend.workers.broadcast_object(summary)
    wanted = session.config.on_save_error == "stop"
    if summary.save_error and (wanted or (session.stopped and summary.checkpoint is None)):
        raise SaveError(
            f"the checkpoint could not be written: {summary.save_error}",
            f"Newest good one: {summary.checkpoint or 'none'}. Mend the disk, then go on with --resume.",
            everywhere=True,
        )
    if session.stopped:
        raise Stopped(summary.error)
    return summary


def _where_it_stood(session: Session) -> str:
    layout, progress = session.layout(), session.progress
    place = f"at step {progress.step:,} of {layout.steps:,} (epoch {session.epoch:.2f})"
    return f"{place}, run directory {session.run_dir}"


def _summarise(session: Session, status: str, problem: str | None, verified: bool = False) -> Summary:
    """Say how the run stands; with ``verified``, its newest checkpoint is read once more."""
    seconds = session.report.seconds()
    newest, failures = session.saver.newest, session.saver.failures
    if newest is not None and verified:
        newest = newest_verified(newest.parent)
    return Summary(
        status=status,
        framework=session.config.framework,
        task=session.config.task,
        workers=session.backend.workers.size,
        steps=session.progress.step,
        samples=session.progress.samples,
        epochs=round(session.epoch, 6),
        seconds=round(seconds, 3),
        samples_per_second=round(median(session.speeds or [0.0]), 1),
        final=session.last_eval,
        run_dir=str(session.run_dir),
        checkpoint=None if newest is None else str(newest),
        bad_samples=session.bad_samples,
        failed_saves=len(failures),
        save_error=failures[-1] if failures else None,
        error=problem,
        stopped_early=session.stopped_early or None,
    )
