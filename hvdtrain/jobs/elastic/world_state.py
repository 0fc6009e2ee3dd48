"""How all workers of a world of an elastic job come to one state, and who writes the run directory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.callbacks import EVAL
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.saver import Saver
from hvdtrain.checkpoints.storage import checkpoints_in, step_of
from hvdtrain.config import Config
from hvdtrain.data.eval_sets import sets_of
from hvdtrain.data.training_data import SkippedSamples
from hvdtrain.errors import EnvironmentFault
from hvdtrain.jobs.entering import report_of, saver_of
from hvdtrain.jobs.opening.setup import TrainingRun
from hvdtrain.jobs.resume import ResumePoint, find_start
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.jobs.run_directory.provenance import config_text
from hvdtrain.jobs.track import trackers_of
from hvdtrain.reporting.jsonl import write_whole
from hvdtrain.reporting.records import INDICES, RecentRecords, WorkersChange, cut_tail, cut_traces
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE, report_of_others
from hvdtrain.reporting.run_report import RunReport
from hvdtrain.session import Session
from hvdtrain.storage.files import check_link
from hvdtrain.training_plan import Progress
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import run_on_rank_zero
from hvdtrain.workers.seeding import random_state_kept
from hvdtrain.workers.world import World

_HAND_OVER_SECONDS = 10.0
_SPEEDS = 1000  # logged windows, of whose speeds the summary has the median


def where_it_stands(session: Session) -> dict[str, Any]:
    """Return where a run stands, as its rank 0 reports to the others."""
    services, skipped = session.services, session.data.skipped
    return {
        "state": session.state,
        "wanted": (session.wanted.stop, session.wanted.save),
        "skipped": (skipped.count, skipped.reported),
        "speeds": services.speeds[-_SPEEDS:],
        "seconds": services.report.seconds(),
        "run_dir": services.run_dir,
        "stopped_early": session.stopped_early,
        "data": dict(session.data.fingerprints),
        "recent": list(services.report.recent),
    }


def stand_there(session: Session, common: Mapping[str, Any]) -> None:
    """Bring this worker, which is not rank 0, to where a run stands."""
    services = session.services
    session.state = common["state"]
    session.state.seconds_before = common["seconds"]
    session.wanted = ControlFlags(*common["wanted"])
    count, reported = common["skipped"]
    session.data.skipped = SkippedSamples(count, session.data.skipped.unreported, reported)
    services.speeds, services.run_dir = common["speeds"], common["run_dir"]
    services.report.recent = RecentRecords(common["recent"])
    session.stopped_early = common["stopped_early"]


def start_of(
    run: TrainingRun, world: World, known: Path | None, is_as_built: bool
) -> tuple[TrainingRun, ResumePoint]:
    """Collective. Find where a world starts from, and load it into every worker."""
    workers = run.backend.workers
    paths = [text for text in workers.allgather_object("" if known is None else str(known)) if text]
    paths += [world.run_dir] if world.run_dir else []
    path = paths[0] if paths else run.config.run_dir
    is_own = bool(paths) or (world.source == "checkpoint" and path is not None)

    def look() -> tuple[bool, bool]:
        folder = Path(path or "")
        log, has_saved = folder / METRICS_FILE, is_own and bool(checkpoints_in(folder / CHECKPOINTS))
        is_untouched = log.is_file() and log.stat().st_size == 0  # made by a run that has written nothing yet
        is_untouched &= not any((folder / name).exists() for name in (SUMMARY_FILE, CHECKPOINTS))
        return has_saved, is_own or (world.generation > 1 and path is not None and is_untouched)

    has_saved, is_begun = run_on_rank_zero(workers, look)
    changes: dict[str, Any] = {"run_dir": path, **({"resume": "auto"} if has_saved else {})}
    run = replace(run.with_config(**changes), hosts=[member.host for member in world.members])
    point = find_start(run, is_as_built)
    if is_begun and point.resumed_step is None:
        point = replace(point, resumed_step=0)
    if world.source == "checkpoint" and not has_saved:
        lost = f"no worker has the state of training any more; {path} has no checkpoint: training starts anew"
        point = replace(point, notes=(*point.notes, lost))
    return run, point


def warm_up(session: Session) -> None:
    """Compile the steps before the others wait for this worker. Local: it is alone."""
    ACTIVITY.enter("compiling the steps", is_long=True)
    plan = session.plan()
    batch = session.data.train_batch(plan, Progress())
    if batch is not None:
        first = next(iter(sets_of(session.data.evaluation)), None)
        eval_batch = None if first is None else session.data.eval_batch(plan, first)
        with random_state_kept():  # a task's own code may draw from Python's and numpy's generators
            session.backend.warm_up(batch, eval_batch)


def report_change(session: Session, world: World, pause_seconds: float) -> None:
    """Local. Report that a world took the place of another one: a line in the log, counts in the summary."""
    if world.change is None:
        return
    session.state.changes += 1
    session.state.paused_seconds += pause_seconds
    plan = session.plan()
    left, joined, why = world.change.left, world.change.joined, world.change.why
    change = WorkersChange(left, joined, why, world.generation, pause_seconds)
    session.services.report.on_change(session.step_info(session.learning_rate(plan)), change, plan.steps)


def take_over_run(run: TrainingRun, session: Session, world: World) -> list[str]:
    """Local. Become the worker that writes the run directory; return what to report to the user."""
    # The logs are cut back to the session's state, and what they lack of it is appended.
    run.lock.generation = world.generation
    services, saved = session.services, session.state.saved_step
    try:
        if isinstance(services.report, RunReport):
            run.lock.acquire(services.run_dir)
            _cut_traces(session)
            notes: list[str] = []
        else:
            notes = _open_again(run, session, world)
            services.has_started = True  # the new report continues from the one before
            written = services.saver.newest
            if saved is not None and (written is None or step_of(written) < saved):
                session.state.save_is_due = True  # it was lost with the rank 0 that wrote it
    except OSError as error:
        raise EnvironmentFault(
            f"cannot continue with the run directory {services.run_dir}: {error}"
        ) from None
    return notes


def hand_over_run(run: TrainingRun, session: Session, world: World) -> None:
    """Local. Stop writing the run directory, so that the new rank 0 can; do nothing if this is not rank 0."""
    old = session.services.report
    if not isinstance(old, RunReport):
        return
    session.services.saver.finish(_HAND_OVER_SECONDS)
    saver = Saver()
    saver.newest, saver.failures = session.services.saver.newest, session.services.saver.failures
    session.services.saver = saver
    old.close()
    if old.folder is not None:  # a checkpoint that is still being written must not take its name
        old.folder.lost_lease = lambda: "the run directory was handed over"
    run.lock.release()
    context = replace(run.context(session.services.run_dir), rank=world.rank, workers=world.size)
    session.services.report = report = report_of_others(context, run.callbacks)
    report.go_on_from(old, session.plan().steps, session.state.progress.step)


def _open_again(run: TrainingRun, session: Session, world: World) -> list[str]:
    """Lock, cut and open the run directory; return what to report to the user."""
    path, lock, step = session.services.run_dir, run.lock, session.state.progress.step
    notes = _lock(path, session.config, lock, world.host)
    check_link(path / INDICES, path)
    is_evaluated = session.state.last_eval_step == step
    tail = cut_tail(path / METRICS_FILE, step, redone=() if is_evaluated else (EVAL,))
    missing = session.services.report.recent.lacking_in(tail, step)
    first = min([step, *(record["step"] for record in missing)])  # TensorBoard has from here on anew
    _cut_traces(session)
    folder, best = path / CHECKPOINTS, session.config.keep_best
    set_aside = storage.quarantine_later(folder, step)
    kept = [one for one in storage.checkpoints_in(folder) if storage.step_of(one) <= step]
    newest = kept[-1] if kept else None
    values = {} if best is None else storage.values_in(folder, best.metric, step)
    old, moved = session.services.report, f"rank 0 is on {world.host} from here on"
    trackers = trackers_of(session.config, path, session.state.tracking_id, changes=[moved], step=step)
    session.services.report = report = report_of(run, session, path, first - 1, trackers)
    (path / SUMMARY_FILE).unlink(missing_ok=True)
    report.append(missing)
    again = [record for record in (*tail, *missing) if record["step"] >= first]
    report.add_events(sorted(again, key=lambda record: int(record["step"])))
    session.services.saver = saver_of(run, session, newest, values)
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
