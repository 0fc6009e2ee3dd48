"""Starting a job: its config and its task's class, then its backend with workers that are watched."""

import inspect
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from hvdtrain.backends import load_backend
from hvdtrain.backends.base import Backend
from hvdtrain.backends.torchrun import join_torchrun
from hvdtrain.backends.workers import forbid_restart
from hvdtrain.config import COMMAND_LINE, Config, Layer
from hvdtrain.config.layers import resolve
from hvdtrain.config.values import check_installed
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.elastic.watch.liveness import Watching, WatchLimits, silence_seconds
from hvdtrain.elastic.watch.worker_watch import WorkerWatch, watch_workers
from hvdtrain.errors import ConfigError, HvdtrainError, PeerLostError, TaskError, UsageError
from hvdtrain.horovod_build.installed import check_patches, installed_build, require_horovod
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
from hvdtrain.jobs import failures
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.session import versions_with
from hvdtrain.task import load_task_class
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import WorkerPlace, assert_consistent
from hvdtrain.workers.seeding import seed_generators

_FIRST_ANSWER_SECONDS = 30


@dataclass(frozen=True)
class JobSpec:
    """What each worker knows before it communicates with the others."""

    config: Config  # the resolved config
    task_class: Any  # the task's class, or a function that makes a task
    build: str  # the Horovod build, as text
    settings: Mapping[str, str]  # environment variables that hvdtrain set
    notes: tuple[str, ...] = ()  # what to report to the user before training
    given: frozenset[str] = frozenset()  # the config fields that the user set
    build_identity: str = ""  # the Horovod build in the words in which workers compare theirs
    best: bool | str = False  # whether init takes the best checkpoint of its run, and by which metric


def prepare(layers: list[Layer], task_class: Any = None, best: bool | str = False) -> JobSpec:
    """Do what needs neither another worker nor the user's code: find the task, settle the config."""
    is_torchrun = _join_launch()  # first: the task's code may request the rank when it is loaded
    task_class, config = settle(layers, task_class)
    if is_torchrun and config.framework != "torch":
        remedy = f"Run: horovodrun -np {os.environ['WORLD_SIZE']} python -m hvdtrain ..."
        raise UsageError("torchrun starts workers of PyTorch alone", remedy, everywhere=True)
    if best and config.init is None:
        raise UsageError("best chooses a checkpoint of the run that init names", "Give init, too.")
    merged, notes = _merged(layers), tuple[str, ...]()
    configured = any(layer.values for layer in layers if layer.source not in COMMAND_LINE)
    if not merged.get("task") and (configured or merged.get("task_options")):  # it may be forgotten
        notes = (f"no task is given: training the built-in task {config.task}",)
    build = identity = ""
    if FRAMEWORKS[config.framework].horovod:
        found = require_horovod(config.framework)
        build, identity = found.describe(), found.identify()
        notes += tuple(filter(None, [check_patches(found, elastic=is_elastic())]))
    check_host()
    settings = environment.prepare(stall_timeout=config.stall_timeout)
    return JobSpec(config, task_class, build, settings, notes, given_fields(layers, config), identity, best)


def settle(layers: list[Layer], task_class: Any = None) -> tuple[Any, Config]:
    """Return the task's class and the config. It changes no environment variables and needs no Horovod."""
    merged = _merged(layers)
    spec = merged.get("task") or Config.model_fields["task"].default
    if not isinstance(spec, str):
        raise ConfigError(f"task: should be a name or a path with a class, found {spec!r}")
    seed_generators(merged.get("seed", Config.model_fields["seed"].default), "import")
    task_class = task_class or load_task_class(spec)
    defaults = getattr(task_class, "defaults", {})
    if not isinstance(defaults, Mapping):
        raise TaskError(f"the defaults of task {spec} must be a mapping, found {defaults!r}")
    if hasattr(task_class, "learning_rate_factor"):
        defaults = {"lr_schedule": "task", **defaults}
    parameters: Iterable[str] = ()
    with suppress(TypeError, ValueError):  # of a class that does not say what it takes
        parameters = inspect.signature(task_class).parameters
    config = resolve([Layer(f"defaults of task {spec}", defaults), *layers], [*parameters])
    check(Job(config), everywhere=False)
    check_installed(config.track)
    return task_class, config


def _merged(layers: Iterable[Layer]) -> dict[str, Any]:
    return {name: value for layer in layers for name, value in layer.values.items()}


def _join_launch() -> bool:
    """Let Horovod see the workers of torchrun, and refuse to start with workers that it will not see."""
    # What MPI sees is known only when it has started: ``HorovodWorkers`` checks it.
    launch, build = stated_launch(), installed_build()
    if launch is None or launch.launcher == HOROVODRUN or build is None:
        return False
    if launch.launcher == TORCHRUN and launch.size > 1:
        join_torchrun()
        return True
    by_default = "gloo" if launched_rank() is None else "mpi"  # as environment.prepare chooses
    controller = os.environ.get("HOROVOD_CONTROLLER", "").lower() or by_default
    if controller == "gloo" or (build.patches and not build.mpi):
        check_launch_is_seen(launch, size=1, rank=0, build=build.mpi or "")
    return False


def given_fields(layers: Iterable[Layer], config: Config) -> frozenset[str]:
    """Return the fields that a user set."""
    # A config file may be that of another run, which lists all fields: those with the value of their default
    # do not count.
    return frozenset(
        name
        for layer in layers
        for name, value in layer.values.items()
        if value is not None
        and not (layer.is_file and getattr(config, name) == Config.model_fields[name].default)
    )


@contextmanager
def started(
    job: JobSpec,
    signals: failures.Signals,
    watching: Watching | None = None,
    membership: Membership | None = None,
    *,
    stays: bool = False,
) -> Iterator[Backend]:
    """Collective. Return a context with the job's backend, in which the job's workers are watched."""
    # After a good end Horovod stays: a script may train again, and MPI starts only once.
    check_may_be_elastic(membership)
    ACTIVITY.enter("starting", is_long=True)  # what an earlier training did last is long ago
    watching = watching or Watching()
    backend = load_backend(job.config, membership)
    ACTIVITY.part = ""  # which part of the model this worker has, if not all of it
    if job.config.stages > 1 and backend.workers.size % job.config.stages == 0:
        ACTIVITY.part = f", as {WorkerPlace(backend.workers, job.config.stages).describe()}"
    try:
        with nullcontext() if membership else closing(_watched(job, backend, watching)):
            watching.explain = membership.explain if membership else watching.explain
            try:
                yield backend
            except PeerLostError as error:
                raise failures.name_lost_worker(error, watching.explain) from error
    except BaseException as error:
        signals.ignore()  # how this ends is settled
        if stays and membership is None and failures.is_shared(error, backend.workers):
            failures.leave_open(backend.close)
            raise
        if membership is not None and isinstance(error, HvdtrainError):
            membership.failed(error)  # the others need not wait
        failures.do_in_time(backend.close)  # workers that wait for this one learn of it
        if membership is None:
            forbid_restart(backend.workers)
        raise


def _watched(job: JobSpec, backend: Backend, watching: Watching) -> WorkerWatch:
    """Collective. Watch the workers of a job that is not elastic."""
    limits = WatchLimits(job.config.stall_timeout, silence_seconds(), failures.is_debugging())
    workers, end = backend.workers, failures.end_at_once
    with failures.expect_answer(_FIRST_ANSWER_SECONDS, workers.rank, workers.host):
        watch, watching.note = watch_workers(
            workers, limits, lambda event, stacks: end(event, stacks, watching.on_worker_lost)
        )
    watching.explain = watch.explain
    return watch


def check_may_be_elastic(membership: Membership | None) -> None:
    """Check that what needs a fixed number of workers was not started as an elastic job."""
    if membership is None and is_elastic():
        raise UsageError(
            "only training can be an elastic job; this needs a fixed number of workers",
            "Start it without --min-np, --max-np and --host-discovery-script.",
            everywhere=True,
        )


def check_alone(backend: Backend, command: str) -> None:
    """Check that this is the only worker. Local: no collective."""
    if backend.workers.size > 1:
        problem = f"{command} is done by one worker; there are {backend.workers.size}"
        raise UsageError(problem, "Start it without a launcher, after the job.", everywhere=True)


def handshake(job: JobSpec, backend: Backend) -> list[str]:
    """Collective. Check that all workers answer, with the same config and versions; return their hosts."""
    workers = backend.workers
    with failures.expect_answer(_FIRST_ANSWER_SECONDS, workers.rank, workers.host):
        hosts = workers.allgather_object(workers.host)
    assert_consistent(workers, common_values(job, backend))
    return hosts


def common_values(job: JobSpec, backend: Backend) -> dict[str, Any]:
    """Return what must be equal on all workers before they open their data."""
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"Python": python, "Horovod": job.build_identity, **versions_with(backend)}
    values: dict[str, Any] = job.config.model_dump(mode="json")
    return values | {f"version of {name}": version for name, version in versions.items()}
