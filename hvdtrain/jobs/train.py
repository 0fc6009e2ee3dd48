"""Training: one job, from its configuration to its summary; what every way of starting one goes through."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.activity import ACTIVITY
from hvdtrain.agreement import waiting_for_rank_zero
from hvdtrain.backends.base import Backend, ModelInfo
from hvdtrain.backends.step_signals import ControlFlags
from hvdtrain.callbacks import RunContext, find_callbacks
from hvdtrain.checkpoints.saver import BackgroundSaver
from hvdtrain.checkpoints.storage import checkpoints_in, step_of
from hvdtrain.checkpoints.verification import newest_verified
from hvdtrain.config import Config, Layer
from hvdtrain.data.eval_sets import first_set, sets_of
from hvdtrain.data.readers import Readers
from hvdtrain.errors import (
    ENDINGS,
    EnvironmentFault,
    HvdtrainError,
    Interrupted,
    NonFiniteParameterError,
    PeerLostError,
    SaveError,
    Stopped,
    WorkerFailure,
)
from hvdtrain.jobs.batch_check import check_batches
from hvdtrain.jobs.data_identity import compare_with_checkpoint
from hvdtrain.jobs.dry_run import dry_run
from hvdtrain.jobs.failure_cause import exchange_cause
from hvdtrain.jobs.failures import do_in_time, end_if_uncaught, name_lost_worker
from hvdtrain.jobs.learning_rate import with_learning_rate
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.run_directory import CHECKPOINTS, lock_run, note_on_links, open_run
from hvdtrain.jobs.run_lock import RunLock
from hvdtrain.jobs.run_plan import describe_plan
from hvdtrain.jobs.setup import JobSpec, TaskData, open_together, prepare, started
from hvdtrain.jobs.signals import Signals, interruptible
from hvdtrain.jobs.unused_options import notes_on_options
from hvdtrain.jobs.world_change import follow_workers
from hvdtrain.loop import run
from hvdtrain.reporting.jsonl import write_json
from hvdtrain.reporting.report import SUMMARY_FILE, SilentReport
from hvdtrain.reporting.summary import Summary
from hvdtrain.run_state import RunState
from hvdtrain.seeding import seed_generators, seed_host_generators, seeded_frameworks
from hvdtrain.session import Session, readers_for
from hvdtrain.task import task_class_of, task_spec, where_raised
from hvdtrain.watch.watch_events import Watching

_LAST_SAVE_SECONDS = 30  # how long a worker that ends early waits for the checkpoint being written
_LOST_SAVE_SECONDS = 10  # likewise if another worker is gone or stalls


def train(task: Any = None, *, framework: str, callbacks: Sequence[Any] = (), **fields: Any) -> Summary:
    """Train a task; the same as ``python -m hvdtrain``, from a script that a launcher starts.

    Collective: every worker of the job calls it.

    Args:
        task: the task's class, an instance of it, or its name or path as ``--task`` takes it; the
            built-in task digits if not given.
        framework: "torch" or "tf".
        callbacks: objects that are told of steps, evaluations and checkpoints, beside the task's own;
            see :class:`hvdtrain.Callback`.
        fields: config fields, such as ``epochs=3``; docs/config.md lists them.

    Returns:
        How the run ended.

    Raises:
        Stopped: If a signal stopped training at a step and its state is saved.
        HvdtrainError: as ``hvdtrain.errors`` lists them. One that the script does not catch ends
            it as the command line would: said once among all workers, without a traceback, with
            its exit code.
    """
    end_if_uncaught()
    named = {} if task is None else {"task": task_spec(task)}
    given = Layer("train()", {**named, "framework": framework, **fields})
    return run_job([given], task_class_of(task), callbacks)


def run_job(layers: list[Layer], task_class: Any = None, callbacks: Sequence[Any] = ()) -> Summary:
    """Resolve the configuration, make the task and train it.

    Collective.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        task_class: the task's class if the caller has it; found by its name otherwise.
        callbacks: those of the caller, beside the task's own.
    """
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers, task_class)
        watching = Watching()
        with RunLock() as lock, started(job, signals, watching) as backend:
            return _train(job, backend, signals, watching, callbacks, lock=lock)


def _train(
    job: JobSpec,
    backend: Backend,
    signals: Signals,
    watching: Watching,
    callbacks: Sequence[Any],
    *,
    lock: RunLock,
) -> Summary:
    """Collective. Agree, build, restore, train."""
    task_data, model, hosts = open_together(job, backend)
    job = replace(job, config=with_learning_rate(job.config, model.own_rates))
    callbacks = find_callbacks(task_data.task, job.config.task, callbacks)
    data, config, workers = task_data.identity, job.config, backend.workers
    lock_run(config, workers, lock)  # before a checkpoint in it is read
    ACTIVITY.enter("reading the checkpoint", is_long=True)
    point = restore(
        config,
        backend,
        len(task_data.train_data),
        compare_data=lambda found: compare_with_checkpoint(found, data, config),
    )
    ACTIVITY.enter("comparing batches", is_long=True)
    checked = check_batches(workers, data, config, point.progress)
    notes = (*job.notes, *model.notes, *task_data.notes, *data.notes, *point.notes, *checked)
    point = replace(point, notes=(*notes, *filter(None, [watching.note])))
    if config.check_data:  # it has seeded them for each sample
        seed_generators(config.seed, "training")
    # transforms that draw from them must not draw the same on all workers
    seed_host_generators(config.seed, f"step {point.progress.step}, rank {workers.rank}")
    services = _entered(
        job,
        backend,
        task_data,
        point,
        callbacks,
        parameters=list(model.parameter_shapes),
        signals=signals,
        lock=lock,
    )
    with services as (session, found):
        of_directory = filter(None, [lock.note, note_on_links(session.run_dir)])
        point = replace(point, notes=(*point.notes, *found, *of_directory))
        watching.on_worker_lost = partial(_write_summary_on_loss, session)
        plan = partial(_plan, job, session, point, hosts, model=model, task=task_data.task)
        options = notes_on_options(
            config,
            job.given,
            session.plan(),
            own_optimizer=model.own_rates is not None,
            has_eval_data=session.eval_data is not None,
        )
        return _train_session(session, plan, (*point.notes, *options), signals, watching)


@contextmanager
def _entered(
    job: JobSpec,
    backend: Backend,
    task_data: TaskData,
    point: ResumePoint,
    callbacks: Sequence[Any],
    *,
    parameters: Sequence[str],
    signals: Signals,
    lock: RunLock,
) -> Iterator[tuple[Session, Sequence[str]]]:
    """Collective. Return a context with the run and its services, which it closes, and the dry run's notes.

    The dry run precedes whatever is written.

    A request to stop does not interrupt the training in it, nor the saving and closing at its end.
    """
    config = job.config
    with readers_for(config, task_data.train_data, task_data.eval_data) as readers:
        session = new_session(config, backend, task_data, point, readers)
        ACTIVITY.enter("in the dry run", is_long=True)
        notes = dry_run(session, task_data.task).notes  # its batches need not stay in memory
        context = RunContext(
            rank=backend.workers.rank,
            workers=backend.workers.size,
            config=config,
            task=task_data.task,
            model=backend.model,
            train_data=task_data.train_data,
            eval_data=first_set(task_data.eval_data),
            eval_sets=sets_of(task_data.eval_data),
        )
        report, run_dir = open_run(config, backend.workers, point.resumed_step, callbacks, context, lock=lock)
        session.report, session.run_dir = report, run_dir
        if backend.workers.rank == 0:
            session.saver = BackgroundSaver(
                run_dir / CHECKPOINTS,
                report,
                keep_last=config.keep_last,
                best=config.keep_best,
                stop_on_error=config.on_save_error == "stop",
                newest=point.newest,
                values=point.values,
                parameters=parameters,
            )
        with signals.defer_to_step_boundary():
            try:
                yield session, notes
            finally:
                session.saver.finish(_LAST_SAVE_SECONDS)
                report.close()  # last: what is being written waits for the log to be on the disk


def new_session(
    config: Config, backend: Backend, task_data: TaskData, point: ResumePoint, readers: Readers
) -> Session:
    """Return the run as it stands before anything is written."""
    session = Session(
        config=config,
        backend=backend,
        train_data=task_data.train_data,
        eval_data=task_data.eval_data,
        report=SilentReport(),
        run_dir=Path(config.run_dir or ""),
        readers=readers,
        fingerprints=task_data.identity.to_keep(),
        state=RunState.from_manifest(point.manifest, config, point.best_value(config)),
    )
    follow_workers(session)
    return session


def _train_session(
    session: Session, describe: Callable[[], str], notes: Sequence[str], signals: Signals, watching: Watching
) -> Summary:
    """Collective. Show the plan, train, and report how it ended.

    Args:
        session: the run.
        describe: returns the plan; it calls the task's own ``describe``, which may fail.
        notes: what to report after the plan.
        signals: what signals asked of this worker.
        watching: what the watch of the workers knows.
    """
    status, problem, in_order = "failed", None, False
    workers = session.backend.workers
    try:
        session.report.say(describe())
        for note in notes:
            session.report.note(note)
        with signals.signals_take_precedence():
            run(session, _polling(session, signals))
            with waiting_for_rank_zero(workers, "writing the last checkpoint"):
                session.saver.finish()
        status, problem = _status(session, signals)
        in_order = True
    except Interrupted as interruption:
        status, problem = "stopped", f"interrupted by {interruption}"
        session.report.say(f"{problem} {_where_it_stood(session)}")
        session.saver.finish(_LAST_SAVE_SECONDS)  # the summary then names what is being written
        if session.saver.newest is None:
            session.report.say("no checkpoint was saved")
        raise
    except PeerLostError as error:
        named = name_lost_worker(error, watching.explain)
        problem = named.problem
        raise named from error
    except HvdtrainError as error:
        problem = error.problem
        raise
    except ENDINGS:
        raise
    except BaseException as error:
        problem = f"training failed {_where_it_stood(session)}: {where_raised(error)}"
        raise WorkerFailure(problem) from error
    finally:
        problem = exchange_cause(session.run_dir, workers.rank, workers.host, problem, sys.exc_info()[1])
        reading = waiting_for_rank_zero(workers, "reading the last checkpoint") if in_order else nullcontext()
        with reading:
            summary = _summarise(session, status, problem, verified=in_order)
            session.report.on_end(summary)
    return _end_together(session, summary)


def _write_summary_on_loss(session: Session, problem: str) -> None:
    """Write how the run stands before the process ends without its main thread.

    Another rank than 0 does so for rank 0, which does not answer, if it can reach the run directory.
    """
    session.saver.finish(_LOST_SAVE_SECONDS)
    summary = _summarise(session, "failed", problem)
    session.report.write_summary(summary)
    if session.backend.workers.rank:
        do_in_time(partial(_write_summary_for_rank_zero, session, summary))


def _write_summary_for_rank_zero(session: Session, summary: Summary) -> None:
    if (session.run_dir / "config.yaml").is_file():
        newest = str(max(checkpoints_in(session.run_dir / CHECKPOINTS), default="")) or None
        write_json(session.run_dir / SUMMARY_FILE, replace(summary, checkpoint=newest).as_dict())


def _plan(
    job: JobSpec, session: Session, point: ResumePoint, hosts: list[str], *, model: ModelInfo, task: Any
) -> str:
    return describe_plan(
        session,
        session.plan(),
        model=model,
        hosts=hosts,
        build=job.build,
        settings=job.settings,
        start=point,
        found=str(task.describe()) if hasattr(task, "describe") else "",
    )


def _polling(session: Session, signals: Signals) -> Callable[[], ControlFlags]:
    """Return what the loop polls at every step: what signals asked of this worker.

    A request to stop is reported, and the summary written, at once: a launcher may leave the workers
    less time than a step and a save take, as mpirun does after Ctrl-C.
    """
    reported = False

    def poll_signals() -> ControlFlags:
        nonlocal reported
        flags = signals.poll()
        if flags.stop and not reported:
            reported = True
            why = f"{signal.Signals(signals.number or 0).name} came"
            session.report.say(f"{why} {_where_it_stood(session)}; stopping after this step")
            session.report.write_summary(_summarise(session, "stopped", why))
        return flags

    return poll_signals


def _status(session: Session, signals: Signals) -> tuple[str, str | None]:
    """Collective. Return how training ended, as all workers see it, and why if not by itself.

    Raises:
        NonFiniteParameterError: If the state to be saved has a parameter that is not finite.
        EnvironmentFault: If another directory has the name of the run directory.
    """
    why = None
    if session.saver.poll():
        why = "a checkpoint could not be written, and on_save_error is stop"
    elif session.stopped and signals.number is not None:
        why = f"{signal.Signals(signals.number).name} came"
    saver = session.saver
    gathered = session.backend.workers.allgather_object((why, saver.not_finite, saver.newest, saver.replaced))
    for _, not_finite, newest, replaced in gathered:
        if not_finite:
            raise _not_finite_error(not_finite, newest)
        if replaced:
            raise EnvironmentFault(
                f"{replaced}; training stopped {_where_it_stood(session)}",
                f"{newest} has the state: continue with --resume and --run-dir {newest.parent.parent}."
                if newest is not None and newest.is_dir()
                else "The state is lost: nothing is written to a directory that may be another job's.",
                everywhere=True,
            )
    why = next((reason for reason, *_ in gathered if reason), None)
    if session.stopped:
        session.report.say(f"stopped {_where_it_stood(session)}: {why}")
    return ("stopped" if session.stopped else "completed"), why


def _not_finite_error(found: str, newest: Path | None) -> NonFiniteParameterError:
    good = "There is no checkpoint before it." if newest is None else f"{newest} is good: --resume takes it."
    return NonFiniteParameterError(
        f"{found}; this state is not saved",
        f"{good} Lower the learning rate, or clip the gradient (--clip-norm).",
        everywhere=True,
    )


def _end_together(session: Session, summary: Summary) -> Summary:
    """Collective. Return rank 0's summary, or raise on all workers if training did not complete.

    Raises:
        Stopped: If a later job can continue from a checkpoint.
        SaveError: If there is none, if the config wants it to be an error, or if training completed and
            its last state is not saved.
    """
    summary = session.backend.workers.broadcast_object(summary)
    wanted = session.config.on_save_error == "stop"
    newest = summary.checkpoint
    is_lost = newest is None or (not session.stopped and step_of(Path(newest)) < summary.steps)
    if summary.save_error and (wanted or is_lost):
        what = "the checkpoint could not be written: " if summary.failed_saves else "the last state is lost: "
        raise SaveError(
            f"{what}{summary.save_error}",
            f"Newest good one: {summary.checkpoint or 'none'}. Mend the disk, then continue with --resume.",
            everywhere=True,
        )
    if session.stopped:
        raise Stopped(summary.error)
    return summary


def _where_it_stood(session: Session) -> str:
    plan, progress = session.plan(), session.state.progress
    place = f"at step {progress.step:,} of {plan.steps:,} (epoch {session.epoch:.2f})"
    return f"{place}, run directory {session.run_dir}"


def _summarise(session: Session, status: str, problem: str | None, verified: bool = False) -> Summary:
    """Say how the run stands; with ``verified``, its newest checkpoint is read once more."""
    seconds = session.report.seconds()
    newest, failures = session.saver.newest, session.saver.failures
    save_error = failures[-1] if failures else None
    if newest is not None and verified:
        written, newest = newest, newest_verified(newest.parent)
        if newest != written and not failures:
            save_error = f"{written} was written, and is damaged or no longer there"
    return Summary(
        status=status,
        framework=session.config.framework,
        task=session.config.task,
        workers=session.backend.workers.size,
        steps=session.state.progress.step,
        samples=session.state.progress.samples,
        epochs=round(session.epoch, 6),
        seconds=round(seconds, 3),
        samples_per_second=round(median(session.speeds or [0.0]), 1),
        final=session.state.last_eval,
        run_dir=str(session.run_dir),
        checkpoint=None if newest is None else str(newest),
        bad_samples=session.skipped.count,
        failed_saves=len(failures),
        save_error=save_error,
        error=problem,
        stopped_early=session.stopped_early or None,
        eval_sets=[name for name in sets_of(session.eval_data) if name],
        changes=session.state.changes,
        paused_seconds=round(session.state.paused_seconds, 3),
    )
