"""Another rank 0: the run directory goes from one worker of an elastic job to another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.callbacks import EVAL, RunContext
from hvdtrain.checkpoints import storage, verification
from hvdtrain.checkpoints.saver import Saver
from hvdtrain.config import Config
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs.entering import saver_of
from hvdtrain.jobs.failures import forget_causes
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.jobs.run_directory.provenance import config_text
from hvdtrain.jobs.track import trackers_of
from hvdtrain.reporting.index_trace import INDICES, cut_traces
from hvdtrain.reporting.jsonl import write_whole
from hvdtrain.reporting.records import cut_tail
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE, report_of_others
from hvdtrain.reporting.run_report import RunReport
from hvdtrain.session import Session
from hvdtrain.storage.files import check_link
from hvdtrain.workers.world import World

_HAND_OVER_SECONDS = 10.0


@dataclass(frozen=True)
class RunServices:
    """What a worker of an elastic job needs to write the run directory when it becomes rank 0."""

    # what callbacks can use of the run, as ``open_run`` takes it; rank and workers may be old
    context: RunContext
    callbacks: Sequence[Any]  # the user's callbacks, this worker's own objects
    parameters: Sequence[str]  # portable names of the trainable parameters
    lock: RunLock  # this worker's lock, whose ``job`` is set
    # returns why this worker may no longer write files; empty while it may
    lost_lease: Callable[[], str] = lambda: ""


def take_over_run(session: Session, world: World, services: RunServices) -> list[str]:
    """Local. Become the worker that writes the run directory: rank 0 of a world whose rank 0 was another.

    Called when ``session.state`` is what the world continues from, before the world's first step and before
    another worker of the world writes; on a rank 0 that was rank 0 before, it only signs the lock anew and
    cuts the traces of indices. Locks the directory, cuts its logs back to ``session.state``, appends what
    this worker knows and the log lacks, sets aside checkpoints of later steps. Sets report and saver of
    ``session.services``; the report has then started.

    Returns:
        What to report to the user, as text.

    Raises:
        EnvironmentFault: If the directory cannot be written, or another run is in it.
    """
    services.lock.generation = world.generation
    try:
        if isinstance(session.services.report, RunReport):
            services.lock.acquire(session.services.run_dir)
            _cut_traces(session)
            notes: list[str] = []
        else:
            notes = _take_over(session, world, services)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot continue with the run directory {session.services.run_dir}: {error}"
        ) from None
    forget_causes(session.services.run_dir)
    return notes


def hand_over_run(
    session: Session, world: World, services: RunServices, timeout_seconds: float = _HAND_OVER_SECONDS
) -> None:
    """Local. Stop writing the run directory, so that the new rank 0 can; do nothing if this is not rank 0."""
    old = session.services.report
    if not isinstance(old, RunReport):
        return
    session.services.saver.finish(timeout_seconds)
    saver = Saver()
    saver.newest, saver.failures = session.services.saver.newest, session.services.saver.failures
    session.services.saver = saver
    old.close()
    if old.folder is not None:  # a checkpoint that is still being written must not take its name
        old.folder.lost_lease = lambda: "the run directory was handed over"
    services.lock.release()
    context = replace(services.context, rank=world.rank, workers=world.size, run_dir=session.services.run_dir)
    session.services.report = report = report_of_others(context, services.callbacks)
    report.go_on_from(old, session.plan().steps, session.state.progress.step)


def _take_over(session: Session, world: World, services: RunServices) -> list[str]:
    """Lock, cut and open the run directory; return what to report to the user."""
    path, lock, step = session.services.run_dir, services.lock, session.state.progress.step
    notes = _lock(path, session.config, lock, world.host)
    check_link(path / INDICES, path)
    is_evaluated = session.state.last_eval_step == step
    tail = cut_tail(path / METRICS_FILE, step, redone=() if is_evaluated else (EVAL,))
    missing = session.services.report.recent.lacking_in(tail, step)
    first = min([step, *(record["step"] for record in missing)])  # TensorBoard has from here on anew
    _cut_traces(session)
    folder, best = path / CHECKPOINTS, session.config.keep_best
    set_aside = storage.quarantine_later(folder, step)
    newest = next(
        reversed([one for one in storage.checkpoints_in(folder) if storage.step_of(one) <= step]), None
    )
    values = {} if best is None else verification.values_in(folder, best.metric, step)
    old, moved = session.services.report, f"rank 0 is on {world.host} from here on"
    session.services.report = report = RunReport(
        open_console(),
        replace(services.context, rank=0, workers=world.size, run_dir=path),
        first - 1,
        services.callbacks,
        lost_lease=services.lost_lease,
        lost_lock=lock.lost,
        reporters=trackers_of(session.config, session.state.tracking_id, [], [moved], done=step)(path),
    )
    (path / SUMMARY_FILE).unlink(missing_ok=True)
    report.append(missing)
    again = [record for record in (*tail, *missing) if record["step"] >= first]
    report.add_events(sorted(again, key=lambda record: int(record["step"])))
    session.services.saver = saver_of(session, services.parameters, newest, values)
    report.go_on_from(old, session.plan().steps, step)
    return [*notes, *set_aside]


def _lock(path: Path, config: Config, lock: RunLock, host: str) -> list[str]:
    """Lock the run directory of this job; make it anew if this worker does not see one."""
    lock.note = ""
    if lock.is_of_job(path):
        lock.acquire(path)
        return [lock.note] if lock.note else []
    if path.exists() and (not path.is_dir() or {found.name for found in path.iterdir()} - {INDICES}):
        raise EnvironmentFault(
            f"run_dir: {path} on {host} is not the run directory of this job",
            "Put the run directory of an elastic job on a file system that all hosts share.",
        )
    path.mkdir(parents=True, exist_ok=True)
    lock.release()
    lock.acquire(path)
    write_whole(path / "config.yaml", config_text(config, path, None))
    return [
        f"{host} cannot see the run directory {path} of the earlier rank 0; it is made anew here, without "
        "what was written until now"
    ]


def _cut_traces(session: Session) -> None:
    if session.config.trace_indices:
        cut_traces(session.services.run_dir, session.state.progress.step)
