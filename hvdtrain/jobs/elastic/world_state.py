"""How all workers of a world of an elastic job come to one state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.backends.step_metrics import NO_FLAGS, ControlFlags
from hvdtrain.checkpoints.storage import checkpoints_in, step_of
from hvdtrain.data.eval_sets import sets_of
from hvdtrain.data.fingerprint import Fingerprint
from hvdtrain.data.training_data import SkippedSamples
from hvdtrain.errors import EnvironmentFault
from hvdtrain.jobs.elastic.take_over import RunServices, hand_over_run, take_over_run
from hvdtrain.jobs.entering import open_services
from hvdtrain.jobs.opening.data_identity import agree_on_data, compare_with_job, first_samples
from hvdtrain.jobs.opening.setup import TrainingRun, model_values
from hvdtrain.jobs.opening.start import common_values
from hvdtrain.jobs.plan_text import show_plan
from hvdtrain.jobs.resume import ResumePoint, find_start
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.reporting.records import RecentRecords, WorkersChange
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE, report_of_others
from hvdtrain.run_state import RunState
from hvdtrain.session import Session
from hvdtrain.training_plan import Progress
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import run_on_rank_zero, waiting_for_rank_zero
from hvdtrain.workers.seeding import random_state_kept
from hvdtrain.workers.wire_types import travels
from hvdtrain.workers.world import World

_SPEEDS = 1000  # logged windows, of whose speeds the summary has the median


@travels
@dataclass(frozen=True)
class Common:
    """Where a run stands, as its rank 0 reports to the others."""

    state: RunState  # what a checkpoint keeps of it, and what of the last step is done
    stop: bool  # whether a worker wants training to end, saved
    save: bool  # whether a worker wants a save
    skipped: int  # how many samples could not be read, on all workers
    reported: set[str]  # which of them the user was notified of
    speeds: list[float]  # samples/s of the last windows
    seconds: float  # time spent training
    run_dir: Path  # the run directory
    stopped_early: str  # why and where training ended because nothing got better; empty otherwise
    data: dict[str, Fingerprint]  # the fingerprints of the data
    recent: list[dict[str, Any]]  # the last records of the log

    @classmethod
    def of(cls, session: Session) -> "Common":
        """Return where a run stands on this worker."""
        return cls(
            state=session.state,
            stop=session.wanted.stop,
            save=session.wanted.save,
            skipped=session.data.skipped.count,
            reported=session.data.skipped.reported,
            speeds=session.services.speeds[-_SPEEDS:],
            seconds=session.services.report.seconds(),
            run_dir=session.services.run_dir,
            stopped_early=session.stopped_early,
            data=dict(session.data.fingerprints),
            recent=list(session.services.report.recent),
        )

    def give_to(self, session: Session) -> None:
        """Make it where a run stands on this worker, which is not rank 0."""
        session.state = self.state
        session.state.seconds_before = self.seconds
        session.wanted = ControlFlags(self.stop, self.save)
        session.data.skipped = SkippedSamples(self.skipped, session.data.skipped.unreported, self.reported)
        session.services.speeds = self.speeds
        session.services.run_dir = self.run_dir
        session.stopped_early = self.stopped_early
        session.services.report.recent = RecentRecords(self.recent)


def values_to_compare(run: TrainingRun) -> Mapping[str, Any]:
    """Return what must be equal on all workers of an elastic job, by the name that an error message uses."""
    return {
        **common_values(run.job, run.backend),
        **run.task_data.common_values,
        **first_samples(run.task_data.identity),
        **model_values(run.model),
    }


def start_of(
    run: TrainingRun, world: World, known: Path | None, check_as_built: Callable[[], None] = lambda: None
) -> tuple[TrainingRun, ResumePoint]:
    """Collective. Find where a world starts from, and load it into every worker."""
    workers, config = run.backend.workers, run.config
    paths = [text for text in workers.allgather_object("" if known is None else str(known)) if text]
    paths += [world.run_dir] if world.run_dir else []
    path = paths[0] if paths else config.run_dir
    is_own = bool(paths) or (world.source == "checkpoint" and path is not None)

    def look() -> tuple[bool, bool]:
        folder = Path(path or "")
        has_saved = is_own and bool(checkpoints_in(folder / CHECKPOINTS))
        return has_saved, is_own or (world.generation > 1 and path is not None and _is_untouched(folder))

    has_saved, is_begun = run_on_rank_zero(workers, look)
    changes: dict[str, Any] = {"run_dir": path, **({"resume": "auto"} if has_saved else {})}
    hosts = [member.host for member in world.members]
    run = replace(run, job=replace(run.job, config=config.model_copy(update=changes)), hosts=hosts)
    point = find_start(run, check_as_built)
    if is_begun and point.resumed_step is None:
        point = replace(point, resumed_step=0)
    if world.source == "checkpoint" and not has_saved:
        lost = f"no worker has the state of training any more; {path} has no checkpoint: training starts anew"
        point = replace(point, notes=(*point.notes, lost))
    return run, point


def _is_untouched(folder: Path) -> bool:
    """Return whether a run directory was made by a run that has written nothing yet."""
    log = folder / METRICS_FILE
    if any((folder / name).exists() for name in (SUMMARY_FILE, CHECKPOINTS)):
        return False
    return log.is_file() and log.stat().st_size == 0


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


class WorldState:
    """The state of one worker, and how it gets that of a world."""

    def __init__(
        self, run: TrainingRun, session: Session, services: RunServices, found: Sequence[str]
    ) -> None:
        self.is_whole, self.is_as_built = False, True
        self._run, self._session, self._services, self._found = run, session, services, found
        self._has_begun = False  # whether this worker knows the run directory and has its report

    def sync(self, world: World) -> None:
        """Collective. Give rank 0's state to all workers that do not have it."""
        session, workers = self._session, self._session.backend.workers
        is_root = workers.rank == 0
        has_it = self.is_whole and session.state.place == world.root
        all_have_it = all(workers.allgather_object(has_it))
        notes: Sequence[str] = ()
        with waiting_for_rank_zero(workers, "taking over the run directory"):
            if is_root:
                notes = self._take_over(world)
        common = workers.broadcast_object(Common.of(session) if is_root else None)
        if not is_root and not self._has_begun:
            compare_with_job(self._run.task_data.identity, common.data)
        if not all_have_it:
            self.is_whole = has_it  # until here it had a state of its own
            self.is_as_built = False
            session.backend.broadcast_state(0)
        if not is_root:
            self._take(common)
        self.is_whole = True
        for note in notes:
            session.services.report.note(note)

    def start(self, world: World) -> None:
        """Collective. Begin training, or continue from a checkpoint: no worker has a state that is whole."""
        session = self._session
        self.is_whole = False
        self._run.lock.release()  # of a directory that was made in a world that was lost at once
        agree_on_data(session.backend.workers, self._run.task_data.identity)
        known = session.services.run_dir if self._has_begun else None
        if self._has_begun:
            hand_over_run(session, world, self._services)
        run, point = start_of(self._run, world, known, self._check_as_built)
        self.is_as_built = point.manifest is None
        before = max(
            session.backend.workers.allgather_object((session.state.changes, session.state.paused_seconds))
        )
        session.state = RunState.from_manifest(point.manifest, run.config, point.best_value(run.config))
        session.state.changes, session.state.paused_seconds = before
        session.data.skipped, session.services.speeds, session.services.has_started = (
            SkippedSamples(),
            [],
            False,
        )
        session.wanted = session.unsent = NO_FLAGS
        session.stopped_early = ""
        open_services(run, session, point, self._services.lost_lease)
        self._has_begun = self.is_whole = True
        show_plan(run, session, point, self._found)

    def _check_as_built(self) -> None:
        if not self.is_as_built:
            raise EnvironmentFault(
                "training starts anew, and model and optimizer of this worker are of an earlier start",
                "The driver of the job starts another worker in its place.",
            )

    def _take_over(self, world: World) -> Sequence[str]:
        """Become the worker that writes the run directory, unless it is that already. Local."""
        session, before = self._session, self._session.services.report
        notes = take_over_run(session, world, self._services)
        if session.services.report is not before:
            session.services.has_started = True  # the new report continues from the one before
            written, saved = session.services.saver.newest, session.state.saved_step
            if saved is not None and (written is None or step_of(written) < saved):
                session.state.save_is_due = True  # it was lost with the rank 0 that wrote it
        return notes

    def _take(self, common: Common) -> None:
        """Take what rank 0 has in common with all; a worker that joins makes its report. Local."""
        session = self._session
        if not self._has_begun:
            context = replace(self._run.context(), run_dir=common.run_dir)
            session.services.report = report_of_others(context, self._run.callbacks)
            session.services.report.set_clock(common.seconds)
            self._has_begun = True
        common.give_to(session)


def report_change(session: Session, world: World, pause_seconds: float) -> None:
    """Local. Report that a world took the place of another one: a line in the log, counts in the summary."""
    if world.change is None:
        return
    session.state.changes += 1
    session.state.paused_seconds += pause_seconds
    plan = session.plan()
    session.services.report.on_change(
        session.step_info(session.learning_rate(plan)),
        WorkersChange(
            world.change.left, world.change.joined, world.change.why, world.generation, pause_seconds
        ),
        plan.steps,
    )
