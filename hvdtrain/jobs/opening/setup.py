"""Opening a job: the task with its data, and the model. All workers agree on both."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.objective.model_call import describe_columns
from hvdtrain.backends.pipeline.groups import Layout
from hvdtrain.backends.records import ModelInfo
from hvdtrain.callbacks import (
    RunContext,
    find_callbacks,
)
from hvdtrain.config import Config
from hvdtrain.data.augment import Mixed
from hvdtrain.data.drawn import Drawn
from hvdtrain.data.eval_sets import first_set, sets_of
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.fingerprint import columns_of
from hvdtrain.data.numeric import set_float_bits
from hvdtrain.data.training_data import TrainingData
from hvdtrain.errors import DataError, TaskError
from hvdtrain.horovod_build import installed_build
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.compatibility import check
from hvdtrain.jobs.features import Job
from hvdtrain.jobs.opening.data_identity import (
    DATA,
    NO_DATA,
    SAME_DATA,
    JobData,
    identify_data,
    keyed,
    words_for,
)
from hvdtrain.jobs.opening.data_sets import (
    align_columns,
    find_merged,
    notes_on_streams,
    open_sets,
    streams_of,
)
from hvdtrain.jobs.opening.dry_run import share_findings
from hvdtrain.jobs.opening.limits import (
    check_eval_batch,
    check_metrics,
    check_train_batch,
    notes_on_options,
    with_learning_rate,
)
from hvdtrain.jobs.opening.make_task import make_task, notes_on_members
from hvdtrain.jobs.opening.memory_check import (
    with_cuts_before,
    with_cuts_of,
)
from hvdtrain.jobs.opening.start import JobSpec, handshake
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.reporting.report import Report
from hvdtrain.session import Services, Session
from hvdtrain.training_plan import TrainingPlan, most_workers
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import Place, assert_consistent
from hvdtrain.workers.seeding import seed_generators
from hvdtrain.workers.user_errors import task_errors

if TYPE_CHECKING:
    from hvdtrain.checkpoints.remote.run_store import RunStore


@dataclass(frozen=True)
class TaskData:
    """A worker's task and its data."""

    task: Any  # the task
    train_data: Any  # the training data, a Dataset
    eval_data: Any  # the evaluation data: a Dataset, EvalSets of them, or None
    common_values: Mapping[str, Any]  # what of the data must be equal on all workers
    identity: JobData = NO_DATA  # the data with their fingerprints, once the workers have compared them
    notes: tuple[str, ...] = ()  # what to report to the user of the data


def new_task(job: JobSpec) -> Any:
    """Make the task. Local: no collective.

    The backend has started: the device is bound before the user's code can use it, and workers
    that take long over their data hold up no start of Horovod, which waits for seconds only.
    """
    config = job.config
    seed_generators(config.seed, "task")
    set_float_bits(32)  # until the model is known
    return make_task(job.task_class, config.task, config.task_options, config.framework)


def open_task_data(job: JobSpec) -> TaskData:
    """Make the task and open its data, with the checks of both. Local: no collective."""
    task = new_task(job)
    own_collate = getattr(task, "train_collate", None)
    train_data, train_values = open_data(task, job.config, "train_data", own_collate)
    eval_data, eval_values = open_data(task, job.config, "eval_data")
    if train_data is None:
        raise DataError(
            f"train_data() of task {job.config.task} gave None",
            "Return the training data from it, such as a pair of arrays: return inputs, targets.",
        )
    if hasattr(task, "sample_probabilities"):
        with task_errors(f"sample_probabilities() of task {job.config.task} failed"):
            probabilities = task.sample_probabilities()
        train_data = Drawn(train_data, probabilities)
        train_values["sample_probabilities"] = train_data.draws.identity
    to_evaluate = {words_for(key): dataset for key, dataset in keyed("eval_data", eval_data).items()}
    aligned = align_columns(to_evaluate, columns_of(train_data), f"the {DATA['train_data']}")
    return TaskData(
        task,
        train_data,
        eval_data,
        {**train_values, **eval_values},
        notes=(
            *notes_on_members(task),
            *_notes_on_data(train_data, "train_data"),
            *_notes_on_data(eval_data, "eval_data"),
            *aligned,
            *notes_on_streams(job.config, {"": train_data, **keyed("eval_data", eval_data)}),
        ),
    )


def _notes_on_data(data: Any, method: str) -> list[str]:
    """Return what data sets have to report to the user."""
    return [
        f"{words_for(key)}: {note}"
        for key, dataset in keyed(method, data).items()
        for note in getattr(dataset, "notes", ())
    ]


def open_data(task: Any, config: Config, method: str, collate: Any = None) -> tuple[Any, dict[str, Any]]:
    """Open one of the task's data sets and check that it can be read. Local: no collective.

    Args:
        task: the task.
        config: the job's config.
        method: a key of ``DATA``.
        collate: what makes batches in place of the task's ``collate``.

    Returns:
        The data set, or None if the task has none, and what of it must be equal on all workers. Of several
        sets, EvalSets of data sets.

    Raises:
        DataError: If it cannot be used.
        TaskError: If the task's method fails.
    """
    seed_generators(config.seed, method)
    with task_errors(f"{method}() of task {config.task} failed"):
        source = getattr(task, method)()
        if source is None:
            return None, {f"size of the {DATA[method]}": 0}
        return open_sets(source, collate or getattr(task, "collate", None), config, method)


def open_together(job: JobSpec, backend: Backend) -> tuple[TaskData, ModelInfo, list[str]]:
    """Collective. Agree, open the data and build the model.

    Returns:
        The task with its data, what is known of the model, and the host of each worker.
    """
    hosts = handshake(job, backend)
    ACTIVITY.enter("opening the data", is_long=True)
    task_data = open_task_data(job)
    ACTIVITY.enter("comparing the data", is_long=True)
    assert_consistent(backend.workers, task_data.common_values, SAME_DATA)
    check_can_evaluate(job.config, task_data)
    data = {"train_data": task_data.train_data, "eval_data": task_data.eval_data}
    task_data = replace(task_data, identity=identify_data(backend.workers, data, job.config))
    if job.config.mixup or job.config.cutmix:
        mixed = Mixed(task_data.train_data, job.config.mixup, job.config.cutmix)
        task_data = replace(task_data, train_data=mixed)
    _check_plan(job.config, backend, task_data)  # before anything is written
    check_metrics(job.config, task_data.task, task_data.eval_data)
    batch = _first_batch(job.config, backend, task_data) if job.config.stages > 1 else None
    config = with_cuts_before(job.config, backend.workers)
    model = build_together(config, task_data.task, backend, batch, task_data.identity)
    return _with_call_note(job.config, task_data, backend), model, hosts


def check_can_evaluate(config: Config, task_data: TaskData) -> None:
    """Check that a task with evaluation data says what an evaluation computes. Local: no collective.

    Raises:
        TaskError: If it has its own training step and no loss.
    """
    row = FRAMEWORKS[config.framework]
    if task_data.eval_data is None or any(hasattr(task_data.task, n) for n in ("loss", row.loss_method)):
        return
    raise TaskError(
        f"the task has {row.step_method} and eval_data(), but neither loss nor {row.loss_method}, which say "
        "what an evaluation computes",
        f"Add loss, or {row.loss_method}(model, batch), or let eval_data() return None.",
        everywhere=True,
    )


def names_of_batch(task_data: TaskData) -> list[str]:
    """Return the names of what a batch of the training data holds."""
    size, suffix = (f"{key} of the {DATA['train_data']}" for key in ("size", ""))
    return [
        key.removesuffix(suffix) for key in task_data.common_values if key.endswith(suffix) and key != size
    ]


def _with_call_note(config: Config, task_data: TaskData, backend: Backend) -> TaskData:
    """Add a note of columns that the model is not given. Local: no collective."""
    row = FRAMEWORKS[config.framework]
    if any(hasattr(task_data.task, method) for method in (row.loss_method, row.step_method)):
        return task_data
    note = describe_columns(config.framework, backend.model, names_of_batch(task_data))
    return replace(task_data, notes=(*task_data.notes, note)) if note else task_data


def _check_plan(config: Config, backend: Backend, task_data: TaskData) -> None:
    """Check that the batches and the length of the training can be meant. Local: no collective."""
    workers = backend.workers
    build = installed_build()
    on_cpu = backend.info.description.endswith(" on the CPU")
    uses_nccl = build is not None and build.nccl and not on_cpu
    streams = streams_of(task_data.train_data, task_data.eval_data)
    has_eval_data = task_data.eval_data is not None
    check(Job(config, task_data.task, workers, uses_nccl, streams, has_eval_data))
    if config.stages > 1:
        Layout.of(workers, config.stages)
    size = len(task_data.train_data)
    replicas = Place(workers, config.stages).replicas
    plan = TrainingPlan.of(config, replicas, size, most=most_workers(workers))
    check_train_batch(config, plan, task_data.train_data, workers.local_size)
    check_eval_batch(config, plan, task_data.eval_data, workers.local_size)


def _first_batch(config: Config, backend: Backend, task_data: TaskData) -> HostBatch | None:
    """Return this worker's first batch of the training data. Local: no collective."""
    data = TrainingData(config, backend.workers, task_data.train_data)
    session = Session(config, backend, data, Services(Report(), Path(os.devnull)))
    return data.train_batch(session.plan(), session.state.progress)


def build_together(
    config: Config, task: Any, backend: Backend, batch: HostBatch | None = None, data: JobData = NO_DATA
) -> ModelInfo:
    """Collective. Build the model with its initial values, compare its shape, and check the types of data."""
    ACTIVITY.enter("building the model", is_long=True)
    model = build(config, task, backend, batch)
    assert_consistent(backend.workers, model_values(model))
    if model.float_bits == 32 and data.datasets:
        found = find_merged({words_for(key): dataset for key, dataset in data.datasets.items()})
        share_findings(backend.workers, found, {})
    return model


def model_values(model: ModelInfo) -> dict[str, Any]:
    """Return what of the model must be equal on all workers."""
    shapes = {f"shape of {name}": shape for name, shape in model.parameter_shapes.items()}
    return {**shapes, "learning rates of the optimizer": model.own_rates}


def build(config: Config, task: Any, backend: Backend, batch: HostBatch | None = None) -> ModelInfo:
    """Build the model with its initial values. Local, but collective if it is split into stages."""
    check(Job(config, task, backend.workers))
    seed_generators(config.seed, "model")
    with task_errors(f"the model of task {config.task} cannot be built"):
        model = backend.build(task, config) if batch is None else backend.build(task, config, batch)
    set_float_bits(model.float_bits)
    return model


@dataclass(frozen=True)
class TrainingRun:
    """A training with its data open and its model built."""

    job: JobSpec  # what the worker knew before; its config has the learning rate that counts
    backend: Backend  # the framework
    task_data: TaskData  # the task with its data
    model: ModelInfo  # what is known of the model
    hosts: Sequence[str]  # the host of each worker
    callbacks: Sequence[Any]  # the user's callbacks, checked
    lock: RunLock  # the lock of the run directory, which rank 0 acquires
    keeps_history: bool = False  # whether the summary that training returns has the run's history
    store: "RunStore | None" = None  # what uploads the run directory, if that is at a URL
    # what rank 0 has to report to the user of the task's file
    notes_on_task: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.job.config

    def notes_on_options(self, plan: TrainingPlan) -> list[str]:
        """Return a note for each option of the job without effect, and for what training does not reach."""
        return notes_on_options(
            self.config,
            self.job.given,
            plan,
            own_optimizer=self.model.own_rates is not None,
            has_eval_data=self.task_data.eval_data is not None,
        )

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
        callbacks: those of the caller, in addition to the task's own.
        lock: what locks the run directory.
    """
    task_data, model, hosts = open_together(job, backend)
    config = with_cuts_of(job.config, model)
    job = replace(job, config=with_learning_rate(config, model.own_rates))
    callbacks = find_callbacks(task_data.task, job.config.task, callbacks)
    return TrainingRun(job, backend, task_data, model, hosts, callbacks, lock)
