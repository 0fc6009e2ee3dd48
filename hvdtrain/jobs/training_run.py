"""What every training does from its configuration to its first step, with fixed workers or in worlds."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.hooks import LoopHook, LoopHooks
from hvdtrain.backends.memory import MemoryPeak
from hvdtrain.backends.options import speaks_for_replica
from hvdtrain.backends.records import ModelInfo
from hvdtrain.callbacks import (
    ON_STEP,
    ON_WINDOW,
    SHOULD_STOP,
    RunContext,
    find_callbacks,
    hook_of,
)
from hvdtrain.checkpoints.saver import BackgroundSaver, Saver, UploadingSaver
from hvdtrain.config import Config
from hvdtrain.data.eval_sets import first_set, sets_of
from hvdtrain.data.readers import Readers
from hvdtrain.data.stream import Stream
from hvdtrain.errors import ConfigError
from hvdtrain.host.cores import peak_bytes
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.opening.data_identity import compare_with_checkpoint
from hvdtrain.jobs.opening.data_sets import roles_of
from hvdtrain.jobs.opening.dry_run import dry_run
from hvdtrain.jobs.opening.limits import check_batches, with_learning_rate
from hvdtrain.jobs.opening.memory_check import (
    heaviest_plan,
    measured_plan,
    notes_on_memory,
    plan_memory,
    with_cuts_of,
)
from hvdtrain.jobs.opening.options import notes_on_options
from hvdtrain.jobs.opening.prepare import JobSpec
from hvdtrain.jobs.opening.setup import TaskData, names_of_batch, open_together
from hvdtrain.jobs.plan_text import describe_plan
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS, lock_run, note_on_links, open_run, run_dir_of
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.jobs.run_directory.provenance import Provenance, keep, provenance_of
from hvdtrain.jobs.run_directory.stored import begin_in_store, values_in_store
from hvdtrain.jobs.track import agree_on_id, trackers_of
from hvdtrain.jobs.world_change import follow_workers
from hvdtrain.reporting.index_trace import IndexTrace
from hvdtrain.reporting.report import Report
from hvdtrain.run_state import RunState
from hvdtrain.session import Session, versions_with
from hvdtrain.storage.files import run_folder
from hvdtrain.task import GivenTask
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.seeding import seed_generators, seed_host_generators

if TYPE_CHECKING:
    from hvdtrain.checkpoints.remote.run_store import RunStore

# by config field, what makes the hook of a tool; a tool is imported only where it is used
_TOOL_HOOKS = {"profile": "hvdtrain.tools.profile.step_profile:StepProfile"}


@dataclass(frozen=True)
class TrainingRun:
    """A training with its data open and its model built.

    Attributes:
        job: what the worker knew before; its config has the learning rate that counts.
        backend: the framework.
        task_data: the task with its data.
        model: what is known of the model.
        hosts: the host of each worker.
        callbacks: the user's callbacks, checked.
        lock: the lock of the run directory, which rank 0 acquires.
        keeps_history: whether the summary that training returns has the run's history.
        store: what uploads the run directory, if that is at a URL.
        notes_on_task: what rank 0 has to tell the user of the task's file.
    """

    job: JobSpec
    backend: Backend
    task_data: TaskData
    model: ModelInfo
    hosts: Sequence[str]
    callbacks: Sequence[Any]
    lock: RunLock
    keeps_history: bool = False
    store: "RunStore | None" = None
    notes_on_task: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.job.config

    def context(self) -> RunContext:
        """Return what callbacks can use of the run, as far as it is known before the run directory."""
        task_data, workers = self.task_data, self.backend.workers
        return RunContext(
            rank=workers.rank,
            workers=workers.size,
            config=self.config,
            task=task_data.task,
            model=self.backend.model,
            train_data=task_data.train_data,
            eval_data=first_set(task_data.eval_data),
            eval_sets=sets_of(task_data.eval_data),
        )


def opened(job: JobSpec, backend: Backend, callbacks: Sequence[Any], lock: RunLock) -> TrainingRun:
    """Collective. Agree, open the data and build the model.

    Args:
        job: the job.
        backend: its framework.
        callbacks: those of the caller, beside the task's own.
        lock: what locks the run directory.
    """
    task_data, model, hosts = open_together(job, backend)
    config = with_cuts_of(job.config, model)
    job = replace(job, config=with_learning_rate(config, model.own_rates))
    callbacks = find_callbacks(task_data.task, job.config.task, callbacks)
    return TrainingRun(job, backend, task_data, model, hosts, callbacks, lock)


def find_start(run: TrainingRun, check_as_built: Callable[[], None] = lambda: None) -> ResumePoint:
    """Collective. Find where to start from, load it into every worker, return it with all notes so far.

    Args:
        run: the training.
        check_as_built: as ``restore`` takes it.
    """
    config, workers, data = run.config, run.backend.workers, run.task_data.identity
    lock_run(config, workers, run.lock)  # before a checkpoint in it is read
    of_store = begin_in_store(config, workers, run.store)
    ACTIVITY.enter("reading the checkpoint", is_long=True)
    point = restore(
        config,
        run.backend,
        len(run.task_data.train_data),
        compare_data=lambda found: compare_with_checkpoint(found, data, config),
        check_as_built=check_as_built,
        is_stream=isinstance(run.task_data.train_data, Stream),
    )
    if config.keep_best is not None and run.store is not None and point.resumed_step is not None:
        values = values_in_store(run.store, run_folder(config.run_dir) / CHECKPOINTS, point.resumed_step)
        point = replace(point, values={**values, **point.values})
    ACTIVITY.enter("comparing batches", is_long=True)
    checked = check_batches(workers, data, config, point.progress)
    notes = (*run.job.notes, *run.model.notes, *run.task_data.notes, *data.notes, *point.notes, *checked)
    return replace(point, notes=(*of_store, *notes))


def seed_training(run: TrainingRun, step: int) -> None:
    """Seed the generators that the task's code may draw from, after this step. Local: no collective."""
    seed = run.config.seed
    if run.config.check_data:  # it has seeded them for each sample
        seed_generators(seed, "training")
    # transforms that draw from them must not draw the same on all workers
    seed_host_generators(seed, f"step {step}, rank {run.backend.workers.rank}")


def new_session(
    config: Config,
    backend: Backend,
    task_data: TaskData,
    point: ResumePoint,
    readers: Readers,
    *,
    callbacks: Sequence[Any] = (),
) -> Session:
    """Collective. Return the run as it stands before anything is written."""
    session = Session(
        config=config,
        backend=backend,
        train_data=task_data.train_data,
        eval_data=task_data.eval_data,
        report=Report(),
        run_dir=run_folder(config.run_dir),
        readers=readers,
        fingerprints=task_data.identity.to_keep(),
        state=RunState.from_manifest(point.manifest, config, point.best_value(config)),
        watched=_watched(config, backend.workers, callbacks),
        stoppers=[callback for callback in callbacks if hook_of(callback, SHOULD_STOP)],
    )
    session.hooks = hooks_of(session)
    follow_workers(session)
    return session


def _watched(config: Config, workers: Workers, callbacks: Sequence[Any]) -> frozenset[str]:
    """Collective. Return the hooks of callbacks after which the next step follows what they freeze or thaw.

    Workers may have other callbacks than rank 0. Where nothing follows, what has changed is refused later.
    """
    own = [hook for hook in (ON_STEP, ON_WINDOW) if any(hook_of(one, hook) for one in callbacks)]
    found = {hook for of_rank in workers.allgather_object(own) for hook in of_rank}
    return frozenset() if workers.is_elastic or config.sync_every else frozenset(found)


def try_out(run: TrainingRun, session: Session) -> Sequence[str]:
    """Collective. Do the dry run, which precedes whatever is written; return its notes."""
    ACTIVITY.enter("in the dry run", is_long=True)
    session.memory = plan_memory(session, run.model)
    peak = peak_bytes()
    # its batches need not stay in memory
    found = dry_run(session, run.task_data.task, session.memory)
    session.forms = found.forms
    session.memory = measured_plan(session, run.model, found, peak)
    session.heaviest = heaviest_plan(session, session.memory)
    return [*notes_on_memory(session.heaviest, session.backend), *found.notes]


def open_services(
    run: TrainingRun, session: Session, point: ResumePoint, lost_lease: Callable[[], str] = lambda: ""
) -> None:
    """Collective. Make the run directory, or cut it back to the start, and the session's report and saver.

    Args:
        run: the training.
        session: the run.
        point: where it starts.
        lost_lease: returns why this worker may no longer write files; empty while it may.
    """
    config, workers = run.config, run.backend.workers
    provenance = _provenance(run) if workers.rank == 0 else None
    known, in_place = session.state.tracking_id, point.resumed_step is not None
    session.state.tracking_id = tracking_id = agree_on_id(config, workers, known, in_place)
    session.report, session.run_dir = open_run(
        config,
        workers,
        point.resumed_step,
        run.callbacks,
        run.context(),
        lock=run.lock,
        lost_lease=lost_lease,
        provenance=provenance,
        new_reporters=trackers_of(
            config, tracking_id, run.hosts, point.changes, origin=point.origin, provenance=provenance
        ),
    )
    if provenance is not None:
        source = point.source if point.manifest is not None else None
        source_dir = None if source is None else run_dir_of(source)
        run.notes_on_task[:] = keep(provenance, session.run_dir, point.progress.step, source_dir)
    session.saver = Saver()
    if workers.rank == 0:
        session.saver = _saver(run, session, point)
        if run.store is not None:
            run.store.start(point.resumed_step)


def _saver(run: TrainingRun, session: Session, point: ResumePoint) -> BackgroundSaver:
    """Return the saver of rank 0."""
    config = run.config
    options: dict[str, Any] = {
        "keep_last": config.keep_last,
        "best": config.keep_best,
        "stop_on_error": config.on_save_error == "stop",
        "newest": point.newest,
        "values": point.values,
        "parameters": list(run.model.parameter_shapes),
    }
    folder = session.run_dir / CHECKPOINTS
    if run.store is None:
        return BackgroundSaver(folder, session.report, **options)
    return UploadingSaver(folder, session.report, run.store, **options)


def _provenance(run: TrainingRun) -> Provenance:
    """Find out where this start of the run comes from. Local: rank 0 does it."""
    versions = versions_with(run.backend)
    if run.job.build_identity:
        versions["Horovod"] = run.job.build_identity
    return provenance_of(run.config, run.hosts, versions, isinstance(run.job.task_class, GivenTask))


def tool_hooks(config: Config) -> list[Callable[[Session], LoopHook]]:
    """Return what makes the hooks of tools that the config asks for. Local.

    Raises:
        ConfigError: If a tool is not there.
    """
    found = []
    for name, place in _TOOL_HOOKS.items():
        if getattr(config, name) is not None:
            module, attribute = place.split(":")
            try:
                found.append(getattr(importlib.import_module(module), attribute))
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"--{name} needs {module}, which this installation of hvdtrain does not have",
                    f"Leave out --{name}, or install hvdtrain anew.",
                    everywhere=True,
                ) from error
    return found


def hooks_of(session: Session) -> LoopHooks:
    """Return what takes part in the loop. Local."""
    config, workers = session.config, session.backend.workers
    hooks: list[LoopHook] = [MemoryPeak(session.backend, config.sync_every or 1)]
    hooks += [make(session) for make in tool_hooks(config)]
    if config.trace_indices:
        hooks.append(
            IndexTrace(
                lambda: (
                    session.run_dir if speaks_for_replica(workers, config) else None,
                    workers.rank,
                    session.state.progress.step,
                    session.generation,
                ),
                may_write=lambda: not session.lost_lease(),
            )
        )
    return LoopHooks(*hooks)


def plan_and_notes(
    run: TrainingRun, session: Session, point: ResumePoint, found: Sequence[str]
) -> tuple[Callable[[], str], Sequence[str]]:
    """Return what gives the plan, and what to report after it. Local: no collective.

    Args:
        run: the training.
        session: the run, with its services.
        point: where it starts.
        found: the notes of the dry run.
    """
    config, task = run.config, run.task_data.task
    of_directory = filter(None, [run.lock.note, note_on_links(session.run_dir), *run.notes_on_task])
    point = replace(point, notes=(*point.notes, *found, *of_directory))
    options = notes_on_options(
        config,
        run.job.given,
        session.plan(),
        own_optimizer=run.model.own_rates is not None,
        has_eval_data=session.eval_data is not None,
    )

    row = FRAMEWORKS[config.framework]
    is_named = not callable(getattr(task, "loss", print)) and not hasattr(task, row.loss_method)

    def describe() -> str:
        return describe_plan(
            session,
            session.plan(),
            model=run.model,
            hosts=list(run.hosts),
            build=run.job.build,
            settings=run.job.settings,
            start=point,
            found=str(task.describe()) if hasattr(task, "describe") else "",
            roles=roles_of(names_of_batch(run.task_data), is_named),
        )

    return describe, (*point.notes, *options)
