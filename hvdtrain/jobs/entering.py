"""Entering a run: its session, the dry run, and its services, which are closed after the last step."""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.backends.hooks import Activities, Clock, LoopHook, LoopHooks, MemoryPeak
from hvdtrain.callbacks import ON_STEP, ON_WINDOW, SHOULD_STOP, hook_of
from hvdtrain.checkpoints.saver import BackgroundSaver, Saver
from hvdtrain.config import Config
from hvdtrain.data.readers import Readers
from hvdtrain.data.training_data import TrainingData, readers_for
from hvdtrain.errors import TaskError
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs.failures import Signals
from hvdtrain.jobs.opening.dry_run import Dry, try_out
from hvdtrain.jobs.opening.setup import TrainingRun
from hvdtrain.jobs.outcome import LAST_SAVE_SECONDS, errors_noted
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS, end_uploads, open_run
from hvdtrain.jobs.run_directory.provenance import keep, provenance_of
from hvdtrain.jobs.track import agree_on_id, trackers_of
from hvdtrain.reporting.records import IndexTrace
from hvdtrain.reporting.report import Report, report_of_others
from hvdtrain.reporting.run_report import RunReport
from hvdtrain.schedule import TrainingProgress
from hvdtrain.session import RunState, Services, Session, versions_with
from hvdtrain.storage.files import run_folder
from hvdtrain.task import GivenTask
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.seeding import seed_host_generators
from hvdtrain.workers.user_errors import task_errors

# a tool, which is imported only where it is used
_PROFILE = "hvdtrain.tools.profile.step_profile"


def seed_training(run: TrainingRun, step: int) -> None:
    """Seed the generators that the task's code may draw from, after this step. Local: no collective."""
    seed = run.config.seed
    # transforms that draw from them must not draw the same on all workers
    seed_host_generators(seed, f"step {step}, rank {run.backend.workers.rank}")


def new_session(run: TrainingRun, point: ResumePoint, readers: Readers) -> Session:
    """Collective. Return the run as it stands before anything is written."""
    config, backend, task_data, callbacks = run.config, run.backend, run.task_data, run.callbacks
    # hooks after which the next step follows what they freeze or thaw
    own = [hook for hook in (ON_STEP, ON_WINDOW) if any(hook_of(one, hook) for one in callbacks)]
    watched = {hook for of_rank in backend.workers.allgather_object(own) for hook in of_rank}
    session = Session(
        config=config,
        backend=backend,
        data=TrainingData(
            config,
            backend.workers,
            task_data.train_data,
            task_data.eval_data,
            readers=readers,
            fingerprints=task_data.identity.to_keep(),
        ),
        services=Services(
            Report(),
            run_folder(config.run_dir),
            keeps_history=run.keeps_history,
            watched=frozenset(() if backend.workers.is_elastic or config.sync_every else watched),
            rate_factor=_rate_factor(task_data.task, backend.workers),
            stoppers=[callback for callback in callbacks if hook_of(callback, SHOULD_STOP)],
        ),
        state=RunState.from_manifest(point.manifest, config, point.best_value(config)),
    )
    session.services.hooks = hooks_of(session)
    return session


_CHECKED = [TrainingProgress(tenth, 10.0) for tenth in range(11)]


def _rate_factor(task: Any, workers: Workers) -> Callable[[TrainingProgress], float] | None:
    """Collective. Return a task's ``learning_rate_factor``, which must be the same on all workers."""
    name = "learning_rate_factor of the task"
    if (given := getattr(task, "learning_rate_factor", None)) is None:
        return None

    def factor(progress: TrainingProgress) -> float:
        with task_errors(f"{name} fails for {progress}"):
            value = float(given(progress))
        if not (math.isfinite(value) and value >= 0):
            remedy = "Return a finite number, 0 or more: the peak learning rate is multiplied by it."
            raise TaskError(f"{name} returned {value} for {progress}", remedy)
        return value

    found = workers.allgather_object([factor(point) for point in _CHECKED])
    if any(one != found[0] for one in found):
        remedy = "Compute it from progress.epoch and progress.epochs alone."
        raise TaskError(f"{name} returns other values on other workers", remedy, everywhere=True)
    return factor


def tool_hooks(config: Config) -> list[Callable[[Session], LoopHook]]:
    """Return what makes the hooks of tools that the config needs. Local."""
    return [] if config.profile is None else [importlib.import_module(_PROFILE).StepProfile]


def hooks_of(session: Session) -> LoopHooks:
    """Return what takes part in the loop. Local."""
    config, workers = session.config, session.backend.workers
    hooks: list[LoopHook] = [MemoryPeak(session.backend, config.sync_every or 1)]
    hooks += [make(session) for make in tool_hooks(config)]
    if config.trace_indices:
        hooks.append(
            IndexTrace(
                lambda: (
                    session.services.run_dir if session.data.place.is_first_stage else None,
                    workers.rank,
                    session.state.progress.step,
                    session.services.generation,
                ),
                may_write=lambda: not session.services.lost_lease(),
            )
        )
    hooks.append(Activities(lambda: session.plan().steps if config.sync_every else None))
    return LoopHooks(*hooks, Clock(session.backend))


def open_services(run: TrainingRun, session: Session, point: ResumePoint) -> None:
    """Collective. Make the run directory, or cut it back to the start, and the session's report and saver."""
    config, workers, services = run.config, run.backend.workers, session.services
    provenance = None
    if workers.rank == 0:
        versions = versions_with(run.backend)
        if run.job.build_identity:
            versions["Horovod"] = run.job.build_identity
        is_instance = isinstance(run.job.task_class, GivenTask)
        provenance = provenance_of(config, run.hosts, versions, is_instance)
    known, in_place = session.state.tracking_id, point.resumed_step is not None
    session.state.tracking_id = tracking_id = agree_on_id(config, workers, known, in_place)

    def make_report(run_dir: Path) -> RunReport:
        facts = {"changes": list(point.changes), "resumed_from": point.origin}
        trackers = trackers_of(config, run_dir, tracking_id, hosts=run.hosts, provenance=provenance, **facts)
        return report_of(run, session, run_dir, point.resumed_step, trackers)

    services.run_dir, report = open_run(
        config, workers, point.resumed_step, lock=run.lock, provenance=provenance, make_report=make_report
    )
    services.report = report or report_of_others(run.context(services.run_dir), run.callbacks)
    if provenance is not None:
        source_dir = point.source.run_dir if point.source and point.manifest else None
        run.notes_on_task[:] = keep(provenance, services.run_dir, point.progress.step, source_dir)
    services.saver = Saver()
    if workers.rank == 0:
        services.saver = saver_of(run, session, point.newest, point.values)
        if run.store is not None:
            run.store.start(point.resumed_step)


def report_of(
    run: TrainingRun, session: Session, run_dir: Path, resumed_step: int | None, trackers: Sequence[Any]
) -> RunReport:
    """Return the report of rank 0. Local."""
    lost = {"lost_lease": session.services.lost_lease, "lost_lock": run.lock.lost}
    return RunReport(
        open_console(), run.context(run_dir), resumed_step, run.callbacks, reporters=trackers, **lost
    )


def saver_of(
    run: TrainingRun, session: Session, newest: Path | None, values: Mapping[Path, float | None]
) -> BackgroundSaver:
    """Return the saver of rank 0; ``BackgroundSaver`` has the meaning of what it is given. Local."""
    config, services = session.config, session.services
    return BackgroundSaver(
        services.run_dir / CHECKPOINTS,
        services.report,
        keep_last=config.keep_last,
        best=config.keep_best,
        stop_on_error=config.on_save_error == "stop",
        newest=newest,
        values=values,
        parameters=list(run.model.parameter_shapes),
        store=run.store,
    )


def close_services(session: Session) -> None:
    """Wait for the checkpoint that is being written, and close the report. Local: no collective."""
    with errors_noted(session.services.report):
        session.services.saver.finish(LAST_SAVE_SECONDS)
    session.services.report.close()  # last: what is being written waits for the log to be on the disk
    end_uploads(session.services.saver, session.services.report)


@contextmanager
def entered(
    run: TrainingRun, point: ResumePoint, *, with_passes: bool = False
) -> Iterator[tuple[Session, Dry]]:
    """Collective. Return a context with the session of a run, and what its dry run has found."""
    # The processes that read samples are started before, and end after the context.
    task_data = run.task_data
    with readers_for(run.config, task_data.train_data, task_data.eval_data) as readers:
        session = new_session(run, point, readers)
        found = try_out(session, task_data.task, run.model)
        found = found if with_passes else replace(found, passes=())
        yield session, found


@contextmanager
def services_open(run: TrainingRun, session: Session, point: ResumePoint, signals: Signals) -> Iterator[None]:
    """Collective. Return a context with the services of a run, which are closed at its end."""
    # A request to stop does not interrupt the training in it, nor the saving and closing at its end.
    try:
        open_services(run, session, point)
    except BaseException:
        close_services(session)  # those that are open
        raise
    with signals.defer_to_step_boundary():
        try:
            yield
        finally:
            close_services(session)
