"""Setting up a job: its config, the handshake between its workers, the task with its data, the model."""

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.backends import load_backend
from hvdtrain.backends.base import Backend
from hvdtrain.backends.objective.model_call import describe_columns
from hvdtrain.backends.options import replicas
from hvdtrain.backends.pipeline.groups import Layout
from hvdtrain.backends.records import ModelInfo
from hvdtrain.backends.start import forbid_restart
from hvdtrain.backends.torchrun import join_torchrun
from hvdtrain.config import COMMAND_LINE, Config, Layer
from hvdtrain.config.layers import resolve
from hvdtrain.config.values import check_installed
from hvdtrain.data.augment import Mixed
from hvdtrain.data.drawn import Drawn
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.fingerprint import columns_of
from hvdtrain.data.numeric import set_float_bits
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.elastic.watch.liveness import Watching, WatchLimits, silence_seconds
from hvdtrain.elastic.watch.worker_watch import WorkerWatch, watch_workers
from hvdtrain.errors import (
    NOT_THE_TASKS,
    ConfigError,
    DataError,
    HvdtrainError,
    PeerLostError,
    TaskError,
    UsageError,
)
from hvdtrain.horovod_build import check_patches, installed_build, require_horovod
from hvdtrain.host import environment
from hvdtrain.host.environment import check_host
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.launcher import (
    HOROVODRUN,
    TORCHRUN,
    check_launch_is_seen,
    is_elastic,
    launched_rank,
    stated_launch,
)
from hvdtrain.jobs.compatibility import check
from hvdtrain.jobs.failures import (
    do_in_time,
    end_at_once,
    expect_answer,
    is_debugging,
    is_shared,
    leave_open,
    name_lost_worker,
)
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
    check_training_length,
)
from hvdtrain.jobs.opening.memory_check import with_cuts_before
from hvdtrain.jobs.opening.options import given_fields
from hvdtrain.jobs.signals import Signals
from hvdtrain.reporting.report import Report
from hvdtrain.session import Session, versions_with
from hvdtrain.task import constructor_parameters, load_task_class, make_task, notes_on_members
from hvdtrain.training_plan import TrainingPlan, most_workers
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import assert_consistent
from hvdtrain.workers.seeding import seed_generators
from hvdtrain.workers.user_errors import where_raised

_FIRST_ANSWER_SECONDS = 30


@dataclass(frozen=True)
class JobSpec:
    """What each worker knows before it communicates with the others.

    Attributes:
        config: the resolved config.
        task_class: the task's class, or a function that makes a task.
        build: the Horovod build, in words.
        settings: environment variables that hvdtrain set.
        notes: what to tell the user before training.
        given: the config fields that the user set.
        build_identity: the Horovod build in the words in which workers compare theirs.
    """

    config: Config
    task_class: Any
    build: str
    settings: Mapping[str, str]
    notes: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    build_identity: str = ""


@dataclass(frozen=True)
class TaskData:
    """A worker's task and its data.

    Attributes:
        task: the task.
        train_data: the training data, a Dataset.
        eval_data: the evaluation data: a Dataset, EvalSets of them, or None.
        common_values: what of the data must be equal on all workers.
        identity: the data with their fingerprints, once the workers have compared them.
        notes: what to tell the user of the data.
    """

    task: Any
    train_data: Any
    eval_data: Any
    common_values: Mapping[str, Any]
    identity: JobData = NO_DATA
    notes: tuple[str, ...] = ()


def prepare(layers: list[Layer], task_class: Any = None) -> JobSpec:
    """Do what needs neither another worker nor the user's code: find the task, settle the config.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        task_class: the task's class if the caller has it; found by its name otherwise.
    """
    is_torchrun = _join_launch()  # first: the task's code may ask for the rank when it is loaded
    task_class, config = settle(layers, task_class)
    if is_torchrun and config.framework != "torch":
        remedy = f"Run: horovodrun -np {os.environ['WORLD_SIZE']} python -m hvdtrain ..."
        raise UsageError("torchrun starts workers of PyTorch alone", remedy, everywhere=True)
    notes = _notes_on_task(layers)
    build = identity = ""
    if FRAMEWORKS[config.framework].horovod:
        found = require_horovod(config.framework)
        build, identity = found.describe(), found.identify()
        notes += tuple(filter(None, [check_patches(found, elastic=is_elastic())]))
    check_host()
    settings = environment.prepare(stall_timeout=config.stall_timeout)
    return JobSpec(config, task_class, build, settings, notes, given_fields(layers, config), identity)


def settle(layers: list[Layer], task_class: Any = None) -> tuple[Any, Config]:
    """Return the task's class and the config. It changes no environment variables and needs no Horovod.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        task_class: the task's class if the caller has it; found by its name otherwise.
    """
    merged = _merged(layers)
    spec = _task_of(merged)
    seed_generators(merged.get("seed", Config.model_fields["seed"].default), "import")
    task_class = task_class or load_task_class(spec)
    defaults = getattr(task_class, "defaults", {})
    if not isinstance(defaults, Mapping):
        raise TaskError(f"the defaults of task {spec} must be a mapping, found {defaults!r}")
    config = resolve(
        [Layer(f"defaults of task {spec}", defaults), *layers], constructor_parameters(task_class)
    )
    check(Job(config), everywhere=False)
    check_installed(config.track)
    return task_class, config


def _merged(layers: Iterable[Layer]) -> dict[str, Any]:
    return {name: value for layer in layers for name, value in layer.values.items()}


def _task_of(merged: Mapping[str, Any]) -> str:
    """Return the task's name or path.

    Raises:
        ConfigError: If it is no text.
    """
    task = merged.get("task") or Config.model_fields["task"].default
    if not isinstance(task, str):
        raise ConfigError(f"task: should be a name or a path with a class, found {task!r}")
    return task


def _notes_on_task(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return a note if the user may have forgotten the task: a config file, or task_options, without it."""
    merged = _merged(layers)
    configured = any(layer.values for layer in layers if layer.source not in COMMAND_LINE)
    if merged.get("task") or not (configured or merged.get("task_options")):
        return ()
    return (f"no task is given: training the built-in task {Config.model_fields['task'].default}",)


def _join_launch() -> bool:
    """Let Horovod see the workers of torchrun, and refuse to start with workers that it will not see.

    What MPI sees is known only when it has started: ``HorovodWorkers`` checks it.

    Returns:
        Whether torchrun started several workers.

    Raises:
        EnvironmentFault: If the other workers of this launch cannot be seen.
    """
    launch, build = stated_launch(), installed_build()
    if launch is None or launch.launcher == HOROVODRUN or build is None:
        return False
    controller = os.environ.get("HOROVOD_CONTROLLER", "").lower()
    by_default = "gloo" if launched_rank() is None else "mpi"  # as environment.prepare chooses
    without_mpi = build.patches and not build.mpi
    if launch.launcher == TORCHRUN and launch.size > 1:
        join_torchrun()
        return True
    if without_mpi or (controller or by_default) == "gloo":
        check_launch_is_seen(launch, size=1, rank=0, build=build.mpi or "")
    return False


@contextmanager
def started(
    job: JobSpec,
    signals: Signals,
    watching: Watching | None = None,
    membership: Membership | None = None,
    *,
    stays: bool = False,
    ranks: Sequence[int] = (),
) -> Iterator[Backend]:
    """Collective. Return a context with the job's backend, in which the job's workers are watched.

    After a good end Horovod stays: a script may train again, and MPI starts only once.

    Args:
        job: the job.
        signals: what signals asked of this worker.
        watching: what is done before the process ends because a worker does not answer.
        membership: this worker's part in an elastic job, whose driver watches the workers; None in others.
        stays: whether Horovod also stays after an error that all workers have.
        ranks: the ranks of MPI that make up the job, if others run something else; empty for all.

    Raises:
        UsageError: If the launcher started an elastic job, and what this process does cannot be elastic.
    """
    check_may_be_elastic(membership)
    ACTIVITY.enter("starting", is_long=True)  # what an earlier training did last is long ago
    watching = watching or Watching()
    backend = load_backend(job.config, membership, ranks)
    ACTIVITY.part = _part_of(job.config, backend)
    try:
        with nullcontext() if membership else _watched(job, backend, watching):
            if membership is not None:
                watching.explain = membership.explain
            try:
                yield backend
            except PeerLostError as error:
                raise name_lost_worker(error, watching.explain) from error
    except BaseException as error:
        signals.ignore()  # how this ends is settled
        if stays and membership is None and is_shared(error, backend.workers):
            leave_open(backend.close)
            raise
        if membership is not None and isinstance(error, HvdtrainError):
            membership.failed(error)  # the others need not wait
        do_in_time(backend.close)  # workers that wait for this one learn of it
        if membership is None:
            forbid_restart(backend.workers)
        raise


def _part_of(config: Config, backend: Backend) -> str:
    """Return which part of the model this worker has, in words that follow an activity; empty if all."""
    if config.stages == 1 or backend.workers.size % config.stages:
        return ""
    return f", as {Layout.of(backend.workers, config.stages).describe()}"


def _watched(job: JobSpec, backend: Backend, watching: Watching) -> WorkerWatch:
    """Collective. Watch the workers of a job that is not elastic."""
    limits = WatchLimits(job.config.stall_timeout, silence_seconds(), is_debugging())
    with expect_answer(_FIRST_ANSWER_SECONDS, backend.workers.rank, backend.workers.host):
        watch, watching.note = watch_workers(
            backend.workers,
            limits,
            lambda event, stacks: end_at_once(event, stacks, watching.on_worker_lost),
        )
    watching.explain = watch.explain
    return watch


def check_may_be_elastic(membership: Membership | None) -> None:
    """Check that what needs a fixed number of workers was not started as an elastic job.

    Args:
        membership: this worker's part in an elastic job; None if what it does cannot be elastic.

    Raises:
        UsageError: If it was.
    """
    if membership is None and is_elastic():
        raise UsageError(
            "only training can be an elastic job; this needs a fixed number of workers",
            "Start it without --min-np, --max-np and --host-discovery-script.",
            everywhere=True,
        )


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
        train_data = Drawn(train_data, _called(task, "sample_probabilities", job.config))
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


def _called(task: Any, method: str, config: Config) -> Any:
    """Return what a method of the task gives.

    Raises:
        TaskError: If it fails.
    """
    try:
        return getattr(task, method)()
    except NOT_THE_TASKS:
        raise
    except BaseException as error:
        raise TaskError(f"{method}() of task {config.task} failed: {where_raised(error)}") from error


def _notes_on_data(data: Any, method: str) -> list[str]:
    """Return what data sets have to tell the user."""
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
    try:
        source = getattr(task, method)()
        if source is None:
            return None, {f"size of the {DATA[method]}": 0}
        return open_sets(source, collate or getattr(task, "collate", None), config, method)
    except NOT_THE_TASKS:
        raise
    except BaseException as error:
        raise TaskError(f"{method}() of task {config.task} failed: {where_raised(error)}") from error


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
    plan = TrainingPlan.of(config, replicas(workers, config), size, most=most_workers(workers))
    check_training_length(config, plan)
    check_train_batch(config, plan, task_data.train_data, workers.local_size)
    check_eval_batch(config, plan, task_data.eval_data, workers.local_size)


def handshake(job: JobSpec, backend: Backend) -> list[str]:
    """Collective. Check that all workers answer, with the same config and versions; return their hosts."""
    workers = backend.workers
    with expect_answer(_FIRST_ANSWER_SECONDS, workers.rank, workers.host):
        hosts = workers.allgather_object(workers.host)
    assert_consistent(workers, common_values(job, backend))
    return hosts


def _first_batch(config: Config, backend: Backend, task_data: TaskData) -> HostBatch | None:
    """Return this worker's first batch of the training data. Local: no collective."""
    session = Session(config, backend, task_data.train_data, task_data.eval_data, Report(), Path(os.devnull))
    return session.train_batch(session.plan(), session.state.progress)


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


def common_values(job: JobSpec, backend: Backend) -> dict[str, Any]:
    """Return what must be equal on all workers before they open their data."""
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"Python": python, "Horovod": job.build_identity, **versions_with(backend)}
    return {
        **job.config.model_dump(mode="json"),
        **{f"version of {name}": version for name, version in versions.items()},
    }


def build(config: Config, task: Any, backend: Backend, batch: HostBatch | None = None) -> ModelInfo:
    """Build the model with its initial values. Local, but collective if it is split into stages."""
    check(Job(config, task, backend.workers))
    seed_generators(config.seed, "model")
    try:
        model = backend.build(task, config) if batch is None else backend.build(task, config, batch)
    except NOT_THE_TASKS:
        raise
    except BaseException as error:
        raise TaskError(f"the model of task {config.task} cannot be built: {where_raised(error)}") from error
    set_float_bits(model.float_bits)
    return model


def check_alone(backend: Backend, command: str) -> None:
    """Check that this is the only worker. Local: no collective.

    Raises:
        UsageError: on every worker alike, if there are several.
    """
    if backend.workers.size > 1:
        raise UsageError(
            f"{command} is done by one worker; there are {backend.workers.size}",
            f"Start it without a launcher: python -m hvdtrain {command} ...",
            everywhere=True,
        )
