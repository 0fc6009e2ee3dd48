"""How training ends: what was raised becomes a status, a problem and an error, alike in every kind of job."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hvdtrain.callbacks import Summary
from hvdtrain.elastic.watch.liveness import WatchEvent
from hvdtrain.errors import ENDINGS, HvdtrainError, Interrupted, PeerLostError, WorkerFailure
from hvdtrain.jobs.failures import exchange_cause, lack_of_memory, name_lost_worker
from hvdtrain.jobs.outcome import LAST_SAVE_SECONDS, summarise, where_it_stood, with_save_error
from hvdtrain.jobs.run_directory.stored import end_uploads, publish
from hvdtrain.jobs.signals import Signals
from hvdtrain.reporting.report import Report
from hvdtrain.session import Session
from hvdtrain.workers.agreement import waiting_for_rank_zero
from hvdtrain.workers.user_errors import where_raised


@dataclass(frozen=True)
class Ending:
    """How training ends before it is done."""

    status: str  # as the summary has it
    problem: str | None  # why; None if nothing is wrong
    error: BaseException  # what this worker ends with


def ending_of(error: BaseException, session: Session, explain: Callable[[], WatchEvent | None]) -> Ending:
    """Return how training ends with what was raised in it. Local: no collective.

    Args:
        error: what was raised.
        session: the run.
        explain: returns what the watch of the workers noticed.
    """
    if isinstance(error, Interrupted):
        return Ending("stopped", f"interrupted by {error}", error)
    if isinstance(error, PeerLostError):
        error = name_lost_worker(error, explain)
    if isinstance(error, HvdtrainError):
        return Ending("failed", error.problem, error)
    if isinstance(error, ENDINGS):
        return Ending("failed", None, error)
    doing = f"training failed {where_it_stood(session)}"
    failure: HvdtrainError = lack_of_memory(error, doing, session.memory.own) or WorkerFailure(
        f"{doing}: {where_raised(error)}"
    )
    failure.__cause__ = error
    return Ending("failed", failure.problem, failure)


@contextmanager
def early_end_reported(
    session: Session,
    explain: Callable[[], WatchEvent | None],
    report: Callable[[Ending], None],
    inform: Callable[[HvdtrainError], None] = lambda error: None,
) -> Iterator[None]:
    """Return a context in which a run trains. What is raised in it is named, reported and raised. Local.

    An error while it is reported is noted, and does not take the place of what ends the training.

    Args:
        session: the run.
        explain: returns what the watch of the workers noticed.
        report: writes the summary.
        inform: says to the driver of an elastic job, before that, that this worker ends with an error.
    """
    try:
        yield
    except BaseException as error:
        ending = ending_of(error, session, explain)
        if isinstance(ending.error, HvdtrainError):
            inform(ending.error)
        with errors_noted(session.services.report):
            if isinstance(error, Interrupted):
                session.services.report.say(f"{ending.problem} {where_it_stood(session)}")
            report(ending)
        if ending.error is error:
            raise
        raise ending.error from error


@contextmanager
def errors_noted(report: Report) -> Iterator[None]:
    """Return a context whose errors are noted: training ends already, for another reason."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # of a console that is closed
            report.note(getattr(error, "problem", "") or f"{type(error).__name__}: {error}")


def report_early_end(session: Session, signals: Signals, ending: Ending) -> None:
    """Report how training ends before it is done, in a job with fixed workers. Local: no collective."""
    if isinstance(ending.error, Interrupted):
        with errors_noted(session.services.report):
            session.services.saver.finish(LAST_SAVE_SECONDS)  # the summary then names what is being written
        if session.services.saver.newest is None:
            session.services.report.say("no checkpoint was saved")
    workers = session.backend.workers
    problem = exchange_cause(
        session.services.run_dir, workers.rank, workers.host, ending.problem, ending.error
    )
    report_end(session, ending.status, problem, signals, in_order=False)


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
