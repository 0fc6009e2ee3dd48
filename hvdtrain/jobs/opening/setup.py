"""Opening a job: the task with its data, and the model. All workers agree on both."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.objective.model_call import describe_columns
from hvdtrain.backends.records import ModelInfo
from hvdtrain.callbacks import RunContext, find_callbacks
from hvdtrain.config import Config
from hvdtrain.data.augment import Mixed
from hvdtrain.data.eval_sets import EvalSets, by_words, check_not_bare_sets, first_set, set_words, sets_of
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.fingerprint import columns_of
from hvdtrain.data.numeric import set_float_bits
from hvdtrain.data.order import Ordered, draws_of, lengths_of
from hvdtrain.data.training_data import TrainingData
from hvdtrain.errors import DataError
from hvdtrain.horovod_build.installed import installed_build
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.opening import data_sets, limits
from hvdtrain.jobs.opening.data_identity import DATA, NO_DATA, SAME_DATA, JobData, identify_data, words_for
from hvdtrain.jobs.opening.dry_run import share_findings
from hvdtrain.jobs.opening.start import JobSpec, handshake
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.reporting.report import Report
from hvdtrain.session import Services, Session
from hvdtrain.training_plan import TrainingPlan, most_workers
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import WorkerPlace, assert_consistent
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
    """Make the task. Local: no collective."""
    # The backend has started: the device is bound before the user's code can use it, and workers
    # that take long over their data hold up no start of Horovod, which waits for seconds only.
    config = job.config
    seed_generators(config.seed, "task")
    set_float_bits(32)  # until the model is known
    return data_sets.make_task(job.task_class, config.task, config.task_options, config.framework)


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
    for order_method, read in (("sample_probabilities", draws_of), ("sample_lengths", lengths_of)):
        if hasattr(task, order_method):
            with task_errors(f"{order_method}() of task {job.config.task} failed"):
                given = getattr(task, order_method)()
            train_data = Ordered(train_data, read(train_data, given))
            train_values[order_method] = train_data.ordering.identity
    data = by_words(train_data, eval_data)
    notes = data_sets.notes_on_members(task)
    notes += [f"{words}: {note}" for words, one in data.items() for note in getattr(one, "notes", ())]
    notes += data_sets.align_columns(
        by_words(None, eval_data), columns_of(train_data), f"the {DATA['train_data']}"
    )
    if job.config.read_workers and data_sets.streams_of(train_data, eval_data):
        notes.append("read_workers: streams are read by a thread of each worker")
    return TaskData(task, train_data, eval_data, {**train_values, **eval_values}, notes=tuple(notes))


def open_data(task: Any, config: Config, method: str, collate: Any = None) -> tuple[Any, dict[str, Any]]:
    """Open data of the task, None if it has none; return what of it must be equal on all workers, too."""
    seed_generators(config.seed, method)
    with task_errors(f"{method}() of task {config.task} failed"):
        source = getattr(task, method)()
        if source is None:
            return None, {f"size of the {DATA[method]}": 0}
        collate = collate or getattr(task, "collate", None)
        if method == "eval_data":
            check_not_bare_sets(source, collates=collate is not None)
        if method != "eval_data" or not isinstance(source, EvalSets):
            return data_sets.open_set(source, collate, config, DATA[method])
        sets, values = {}, {"names of the evaluation sets": ", ".join(source)}
        for name, one in source.items():
            sets[name], found = data_sets.open_set(one, collate, config, set_words(name), is_named=True)
            values |= found
        return EvalSets(sets), values


def names_of_batch(task_data: TaskData) -> list[str]:
    """Return the names of what a batch of the training data holds."""
    size, suffix = (f"{key} of the {DATA['train_data']}" for key in ("size", ""))
    return [
        key.removesuffix(suffix) for key in task_data.common_values if key.endswith(suffix) and key != size
    ]


def _check_plan(config: Config, backend: Backend, task_data: TaskData) -> None:
    """Check that the batches and the length of the training can be meant. Local: no collective."""
    workers, build = backend.workers, installed_build()
    on_cpu = backend.info.description.endswith(" on the CPU")
    uses_nccl = build is not None and build.nccl and not on_cpu
    streams = data_sets.streams_of(task_data.train_data, task_data.eval_data)
    has_eval_data = task_data.eval_data is not None
    check(Job(config, task_data.task, workers, uses_nccl, streams, has_eval_data))
    replicas = WorkerPlace(workers, config.stages).replicas
    TrainingPlan.of(config, replicas, len(task_data.train_data), most=most_workers(workers))


def build_together(
    config: Config, task: Any, backend: Backend, batch: HostBatch | None = None, data: JobData = NO_DATA
) -> ModelInfo:
    """Collective. Build the model with its initial values, compare its shape, and check the types of data."""
    ACTIVITY.enter("building the model", is_long=True)
    model = build(config, task, backend, batch)
    assert_consistent(backend.workers, model_values(model))
    if model.float_bits == 32 and data.datasets:
        found = data_sets.find_merged({words_for(key): dataset for key, dataset in data.datasets.items()})
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
    hosts: Sequence[str] = ()  # the host of each worker
    callbacks: Sequence[Any] = ()  # the user's callbacks, checked
    lock: RunLock = field(default_factory=RunLock)  # the lock of the run directory, which rank 0 acquires
    keeps_history: bool = False  # whether the summary that training returns has the run's history
    store: "RunStore | None" = None  # what uploads the run directory, if that is at a URL
    # what rank 0 has to report to the user of the task's file
    notes_on_task: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.job.config

    def with_config(self, config: Config | None = None, **changes: Any) -> "TrainingRun":
        """Return the run with another config, or with other values of some fields."""
        config = config or self.config.model_copy(update=changes)
        return replace(self, job=replace(self.job, config=config))

    def notes(self) -> tuple[str, ...]:
        """Return what is to be reported of the job, the model and the data."""
        data = self.task_data
        return (*self.job.notes, *self.model.notes, *data.notes, *data.identity.notes)

    def notes_on_options(self, plan: TrainingPlan) -> list[str]:
        """Return a note for each option of the job without effect, and for what training does not reach."""
        own, has_eval = self.model.own_rates is not None, self.task_data.eval_data is not None
        found = limits.unused_options(self.config, self.job.given, own_optimizer=own, has_eval_data=has_eval)
        return [*found, *limits.unreached_parts(self.config, plan)]

    def context(self, run_dir: Path) -> RunContext:
        """Return what callbacks can use of the run, as far as it is known before its first step."""
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
            run_dir=run_dir,
        )


def opened(job: JobSpec, backend: Backend, callbacks: Sequence[Any] | None = None) -> TrainingRun:
    """Collective. Agree, open the data, build the model; with ``callbacks``, find those of the task too."""
    config, workers = job.config, backend.workers
    hosts = handshake(job, backend)
    ACTIVITY.enter("opening the data", is_long=True)
    data = open_task_data(job)
    ACTIVITY.enter("comparing the data", is_long=True)
    assert_consistent(workers, data.common_values, SAME_DATA)
    limits.check_metrics(config, data.task, data.eval_data)
    data = replace(
        data,
        identity=identify_data(workers, {"train_data": data.train_data, "eval_data": data.eval_data}, config),
    )
    if config.mixup or config.cutmix:
        data = replace(data, train_data=Mixed(data.train_data, config.mixup, config.cutmix))
    _check_plan(config, backend, data)  # before anything is written
    batch = None
    if config.stages > 1:  # each stage is built for what the one before it gives
        reading = TrainingData(config, workers, data.train_data)
        session = Session(config, backend, reading, Services(Report(), Path(os.devnull)))
        batch = reading.train_batch(session.plan(), session.state.progress)
    model = build_together(config, data.task, backend, batch, data.identity)
    row = FRAMEWORKS[config.framework]
    if not any(hasattr(data.task, method) for method in (row.loss_method, row.step_method)):
        note = describe_columns(config.framework, backend.model, names_of_batch(data))
        data = replace(data, notes=(*data.notes, *filter(None, [note])))
    called = [] if callbacks is None else find_callbacks(data.task, config.task, callbacks)
    run = TrainingRun(job, backend, data, model, hosts, called)
    return run.with_config(learning_rate=limits.learning_rate_of(config, model.own_rates))
