"""How training ends: what was raised, the summary, and the agreement of all workers on it."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hvdtrain import errors
from hvdtrain.backends.hooks import own_peak_mib
from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.callbacks import EVAL, Best, Summary, parse_lines
from hvdtrain.checkpoints.storage import checkpoints_in, newest_verified, step_of
from hvdtrain.config import Config
from hvdtrain.data.eval_sets import sets_of
from hvdtrain.early_stopping import LINE_FIELDS, MEASURES, PEAK_DEVICE_MEMORY, PEAK_MEMORY, MetricGoal
from hvdtrain.elastic.watch.liveness import WatchEvent
from hvdtrain.jobs.failures import Signals, do_in_time, exchange_cause, lack_of_memory, name_lost_worker
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS, end_uploads, publish, published
from hvdtrain.reporting.jsonl import lines_of, write_json
from hvdtrain.reporting.records import TAIL, line_of
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE, Report
from hvdtrain.session import Session
from hvdtrain.workers.agreement import waiting_for_rank_zero
from hvdtrain.workers.user_errors import where_raised

# numbers of an evaluation that are no metrics
_NO_METRICS = LINE_FIELDS | MEASURES


def best_of(lines: Iterable[bytes], config: Config, checkpoints: Mapping[int, str]) -> dict[str, Best]:
    """Return the best value of each evaluation metric."""
    named = (config.plateau_goal, config.early_stopping, config.keep_best)  # the last one counts
    goals = {goal.metric: goal for goal in named if goal is not None}
    found: dict[str, Best] = {}
    for record in parse_lines(line for line in lines if b'"eval"' in line):
        if record.get("phase") != EVAL:
            continue
        for name, value in record.items():
            if name in _NO_METRICS or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            goal = goals.setdefault(name, MetricGoal.parse(name))
            if goal.improves(value, found[name].value if name in found else None):
                found[name] = Best(value, record["step"], checkpoints.get(record["step"]))
    return found


LAST_SAVE_SECONDS = 30  # how long a worker that ends early waits for the checkpoint being written
LOST_SAVE_SECONDS = 10  # likewise if another worker is gone or stalls


def write_summary_on_loss(session: Session, problem: str) -> None:
    """Write how the run stands before the process ends without its main thread."""
    # Another rank than 0 does so for rank 0, which does not answer, if it can reach the run directory. In an
    # elastic job it does not: another worker becomes rank 0.
    run_dir = session.services.run_dir
    session.services.saver.finish(LOST_SAVE_SECONDS)
    summary = summarise(session, "failed", problem)
    session.services.report.write_summary(summary)

    def write_for_rank_zero() -> None:
        config, written = run_dir / "config.yaml", run_dir / SUMMARY_FILE
        if not config.is_file():
            return
        is_new = written.is_file() and written.stat().st_mtime_ns > config.stat().st_mtime_ns
        if is_new and json.loads(written.read_bytes())["status"] == "failed":
            return  # rank 0 is cut off from this host, not lost
        newest = str(max(checkpoints_in(run_dir / CHECKPOINTS), default="")) or None
        write_json(written, replace(summary, checkpoint=newest).as_dict())

    if session.backend.workers.rank and not session.backend.workers.is_elastic:
        do_in_time(write_for_rank_zero)


def polling(session: Session, signals: Signals) -> Callable[[], ControlFlags]:
    """Return what the loop polls at every step: what signals requested of this worker."""
    # A request to stop is reported, and the summary written, at once: a launcher may leave the workers
    # less time than a step and a save take, as mpirun does after Ctrl-C.
    reported = False
    if session.config.max_time is not None:
        signals.end_seconds = time.monotonic() + session.config.max_time

    def poll_signals() -> ControlFlags:
        nonlocal reported
        flags = signals.poll()
        if flags.stop and not reported:
            reported = True
            when = "this step" if session.config.sync_every is None else "the workers have synchronised"
            session.services.report.say(f"{signals.why} {where_it_stood(session)}; stopping after {when}")
            session.services.report.write_summary(summarise(session, "stopped", signals.why))
        return flags

    return poll_signals


def status_of(session: Session, signals: Signals, why: str | None = None) -> tuple[str, str | None]:
    """Collective. Return how training ended, as all workers see it, and why if not by itself."""
    saver = session.services.saver
    if saver.poll():
        why = "a checkpoint could not be written, and on_save_error is stop"
    elif session.stopped and signals.why:
        why = signals.why
    gathered = session.backend.workers.allgather_object((why, saver.not_finite, saver.newest, saver.replaced))
    for _, not_finite, newest, replaced in gathered:
        if not_finite:
            good = f"{newest} is good: --resume takes it." if newest else "There is no checkpoint before it."
            remedy = f"{good} Lower the learning rate, or clip the gradient (--clip-norm)."
            problem = f"{not_finite}; this state is not saved"
            raise errors.NonFiniteParameterError(problem, remedy, everywhere=True)
        if replaced:
            run_dir = None if newest is None or not newest.is_dir() else newest.parent.parent
            remedy = "The state is lost: nothing is written to a directory that may be another job's."
            if run_dir not in (None, session.services.run_dir):
                remedy = f"{newest} has the state: continue with --resume and --run-dir {run_dir}."
            problem = f"{replaced}; training stopped {where_it_stood(session)}"
            raise errors.EnvironmentFault(problem, remedy, everywhere=True)
    why = next((reason for reason, *_ in gathered if reason), None)
    if session.stopped:
        session.services.report.say(f"stopped {where_it_stood(session)}: {why}")
    return ("stopped" if session.stopped else "completed"), why


def end_together(session: Session, summary: Summary) -> Summary:
    """Collective. Return rank 0's summary, or raise on all workers if training did not complete."""
    workers, log = session.backend.workers, b""
    if session.services.keeps_history and not session.stopped:  # which gives no summary
        with waiting_for_rank_zero(workers, "reading metrics.jsonl"):
            if workers.rank == 0:
                summary = with_own_history(session, summary)
        log = bytes(workers.broadcast_object(np.frombuffer(summary.metrics_log, np.uint8)))
    common: Summary = workers.broadcast_object(replace(summary, metrics_log=b""))
    summary = replace(common, metrics_log=log)
    if summary.save_error and _is_unsaved(session, summary):
        what = "the checkpoint could not be written: " if summary.failed_saves else "the last state is lost: "
        remedy = "Mend the disk, then continue with --resume."
        if session.is_remote and not summary.failed_saves:  # the state is on this host
            what, remedy = "", "The same command with --resume, on the host of rank 0, uploads the rest."
        newest = f"Newest good one: {summary.checkpoint or 'none'}. "
        raise errors.SaveError(f"{what}{summary.save_error}", newest + remedy, everywhere=True)
    if session.stopped:
        raise errors.Stopped(summary.error)
    return summary


def _is_unsaved(session: Session, summary: Summary) -> bool:
    """Return whether a job ends with an error because of what is not saved. Local: rank 0 knows."""
    newest, is_over = summary.checkpoint, not session.stopped
    is_lost = session.is_remote and is_over  # what is in no store is not where it should be
    is_lost |= newest is None or (is_over and step_of(Path(newest)) < summary.steps)
    return bool(summary.save_error) and (is_lost or session.config.on_save_error == "stop")


def with_save_error(session: Session, summary: Summary, error: str | None) -> Summary:
    """Return the summary of an end in order with an error of saving. Local: rank 0 knows of one."""
    summary = replace(summary, save_error=summary.save_error or error)
    return replace(summary, status="unsaved") if _is_unsaved(session, summary) else summary


def with_own_history(session: Session, summary: Summary) -> Summary:
    """Return a summary with the run's history, as this worker finds it, and the best values in it. Local."""
    services = session.services
    if not services.keeps_history:
        return summary
    lines, kept = list[bytes](), dict[int, str]()
    with suppress(OSError):
        lines.extend(lines_of(services.run_dir / METRICS_FILE))
    lines += [line_of(record) for record in services.report.recent.lacking_in(parse_lines(lines[-TAIL:]))]
    with suppress(OSError):
        paths = checkpoints_in(services.run_dir / CHECKPOINTS)
        kept = {step_of(path): session.location_of(path) for path in paths}
    log = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in lines)
    return replace(summary, best=best_of(lines, session.config, kept), metrics_log=log)


def where_it_stood(session: Session) -> str:
    """Return where training stands, as text that follows "stopped"."""
    plan, progress = session.plan(), session.state.progress
    place = f"at step {progress.step:,} of {plan.steps:,} (epoch {session.epoch:.2f})"
    return f"{place}, run directory {session.location_of(session.services.run_dir)}"


def summarise(session: Session, status: str, problem: str | None, verified: bool = False) -> Summary:
    """Say how the run stands; with ``verified``, its newest checkpoint is read once more."""
    services, saver = session.services, session.services.saver
    seconds = services.report.seconds()  # before the checkpoint is read
    # of the last checkpoint, which this worker may have written since the workers reported theirs
    known, own = services.hooks.values(), own_peak_mib(session.backend)
    memory, device_memory = (
        max(known.get(name, 0.0), mib)
        for name, mib in zip((PEAK_MEMORY, PEAK_DEVICE_MEMORY), own, strict=True)
    )
    newest, failures, best = saver.newest, saver.failures, None
    with suppress(OSError):
        best = saver.best()
    save_error = failures[-1] if failures else None
    if newest is not None and verified:
        written, newest = newest, newest_verified(newest.parent)
        if newest != written and not failures:
            save_error = f"{written} was written, and is damaged or no longer there"
    checkpoint = None if newest is None else str(newest)
    if session.is_remote:
        checkpoint, problem_there = published(saver)
        save_error = save_error or problem_there
    summary = Summary(
        status=status,
        framework=session.config.framework,
        task=session.config.task,
        workers=session.backend.workers.size,
        steps=session.state.progress.step,
        samples=session.state.progress.samples,
        epochs=round(session.epoch, 6),
        seconds=round(seconds, 3),
        samples_per_second=round(median(services.speeds or [0.0]), 1),
        final=session.state.last_eval,
        run_dir=session.location_of(services.run_dir),
        checkpoint=checkpoint,
        best_checkpoint=session.location_of(best) if best is not None else None,
        bad_samples=session.data.skipped.count,
        failed_saves=len(failures),
        save_error=save_error,
        error=problem,
        stopped_early=session.stopped_early or None,
        eval_sets=[name for name in sets_of(session.data.evaluation) if name],
        changes=session.state.changes,
        paused_seconds=round(session.state.paused_seconds, 3),
        peak_memory_mib=round(memory, 1),
        peak_device_memory_mib=round(device_memory, 1),
    )
    return with_save_error(session, summary, None) if verified else summary


def _ending_of(
    error: BaseException, session: Session, explain: Callable[[], WatchEvent | None]
) -> tuple[str, str | None, BaseException]:
    """Return the status and problem of training that ends with an error, and what to raise. Local."""
    if isinstance(error, errors.Interrupted):
        return "stopped", f"interrupted by {error}", error
    if isinstance(error, errors.PeerLostError):
        error = name_lost_worker(error, explain)
    if isinstance(error, errors.HvdtrainError):
        return "failed", error.problem, error
    if isinstance(error, errors.ENDINGS):
        return "failed", None, error
    doing = f"training failed {where_it_stood(session)}"
    lack = lack_of_memory(error, doing, session.memory)
    named = lack or errors.WorkerFailure(f"{doing}: {where_raised(error)}")
    named.__cause__ = error
    return "failed", named.problem, named


@contextmanager
def early_end_reported(
    session: Session,
    explain: Callable[[], WatchEvent | None],
    report: Callable[[str, str | None, BaseException], None],
    inform: Callable[[errors.HvdtrainError], None] = lambda error: None,
) -> Iterator[None]:
    """Return a context in which a run trains. What is raised in it is named, reported and raised. Local."""
    # An error while it is reported is noted, and does not take the place of what ends the training.
    try:
        yield
    except BaseException as error:
        status, problem, named = _ending_of(error, session, explain)
        if isinstance(named, errors.HvdtrainError):
            inform(named)
        with errors_noted(session.services.report):
            if isinstance(error, errors.Interrupted):
                session.services.report.say(f"{problem} {where_it_stood(session)}")
            report(status, problem, named)
        if named is error:
            raise
        raise named from error


@contextmanager
def errors_noted(report: Report) -> Iterator[None]:
    """Return a context whose errors are noted: training ends already, for another reason."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # of a console that is closed
            report.note(getattr(error, "problem", "") or f"{type(error).__name__}: {error}")


def report_early_end(
    session: Session, signals: Signals, status: str, problem: str | None, error: BaseException
) -> None:
    """Report how training ends before it is done, in a job with fixed workers. Local: no collective."""
    services, workers = session.services, session.backend.workers
    if isinstance(error, errors.Interrupted):
        with errors_noted(services.report):
            services.saver.finish(LAST_SAVE_SECONDS)  # the summary then names what is being written
        if services.saver.newest is None:
            services.report.say("no checkpoint was saved")
    problem = exchange_cause(services.run_dir, workers.rank, workers.host, problem, error)
    report_end(session, status, problem, signals, in_order=False)


def report_end(
    session: Session, status: str, problem: str | None, signals: Signals, in_order: bool = True
) -> Summary:
    """Upload what was written, report how training ended, and upload that. Collective if in order."""
    waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext
    if in_order:
        waiting = partial(waiting_for_rank_zero, session.backend.workers)
    ending = status if in_order else "failed"
    seconds = session.services.report.seconds()  # without the uploads that are awaited
    with waiting("uploading the last checkpoint"):
        publish(session, ending, signals)
    with waiting("reading the last checkpoint"):
        summary = summarise(session, status, problem, verified=in_order)
        summary = replace(summary, seconds=round(seconds, 3))
        session.services.report.on_end(summary)
    with waiting("uploading the summary"):
        missing = publish(session, ending, signals)
        if missing and in_order and not summary.save_error:
            summary = with_save_error(session, summary, missing)
            session.services.report.write_summary(summary)  # which the store does not have
        if missing and in_order:  # before other workers end, for which mpirun ends this one
            end_uploads(session.services.saver, session.services.report)
    return summary
