"""Programs without hvdtrain's trainer that do a job's work: what both frameworks' programs have in common."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from hvdtrain.backends.base import Backend
from hvdtrain.backends.portable.initial_values import with_initial_values
from hvdtrain.bench.machine import CpuTimes, busy_hosts
from hvdtrain.bench.measure import CHUNK, bench_config
from hvdtrain.config import Config, Layer
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import UsageError
from hvdtrain.frameworks import FRAMEWORKS
from hvdtrain.jobs.setup import open_task_data, prepare
from hvdtrain.reporting.report import SilentReport
from hvdtrain.seeding import seed_host_generators
from hvdtrain.session import Session, readers_for
from hvdtrain.training_plan import Progress

_WARM_STEPS = 20
_THIS_HOST = "this host"
# Fields that a program carries over, and those that do not change what a step does. Any other field must have
# its default, so that a new one is refused until a program can do it.
_CARRIED = {
    "framework", "task", "task_options", "batch_size", "global_batch_size", "learning_rate", "lr_scaling",
    "base_batch_size", "lr_schedule", "warmup_epochs", "warmup_steps", "lr_final_fraction", "lr_step_epochs",
    "lr_step_factor", "lr_cycle_epochs", "optimizer", "momentum", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "clip_norm", "label_smoothing", "device", "threads", "read_threads", "read_workers",
    "seed", "initial_parameters",
}  # fmt: skip
_OF_THE_RUN = {
    "epochs", "steps", "eval_batch_size", "rescale_epochs", "plateau_metric", "plateau_patience",
    "plateau_factor", "early_stopping", "early_stopping_patience", "check_data", "on_changed_data", "run_dir",
    "resume", "save_every", "keep_last", "keep_best", "on_save_error", "log_every", "eval_every",
    "check_replicas_every", "stall_timeout", "trace_indices", "lars_trust_coefficient", "profile",
    "track", "track_checkpoints",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Which process of a program this is.

    Attributes:
        rank: its rank.
        size: number of processes, which are all on this host.
        store: a file by which they may find each other.
        ports: a free port of this host for each of them.
    """

    rank: int = 0
    size: int = 1
    store: str = ""
    ports: Sequence[int] = ()


@dataclass(frozen=True)
class Peer:
    """A program's job: what it has of the user's.

    Attributes:
        config: the config.
        task: the user's task.
        learning_rate: that of the first step.
        session: what reads the data; it has no backend.
        place: which process this is.
    """

    config: Config
    task: Any
    learning_rate: float
    session: Session
    place: Place

    @contextmanager
    def batches(self) -> Iterator[Iterator[HostBatch]]:
        """Return a context with the batches of this process, read as hvdtrain reads them."""
        config = self.config
        with readers_for(config, self.session.train_data, None) as readers:
            self.session.readers = readers
            with self.session.train_feed(self.session.plan()) as feed:
                yield iter(feed)


@dataclass(frozen=True)
class LossOnly:
    """A task without its metrics: a program that a user writes computes none in each step.

    Attributes:
        task: the task.
    """

    task: Any
    metrics: ClassVar[dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)


def prepare_peer(layers: list[Layer]) -> Callable[[Place], Peer]:
    """Settle a job's config, and return what opens its data once the place of this process is known.

    Variables that hvdtrain sets for its own jobs, such as Horovod's fusion threshold, are unset again: other
    programs have the defaults of Horovod and MPI, and what the user has set.

    Args:
        layers: config values, weakest source first, without the task's defaults.

    Raises:
        UsageError: If the program could not do the same work.
    """
    job = prepare(layers)
    for name in job.settings:
        os.environ.pop(name, None)
    check_carried(job.config, job.task_class)
    config = bench_config(job.config)

    def open_peer(place: Place) -> Peer:
        task_data = open_task_data(job)
        workers = workers_at(place)
        session = Session(
            config=config,
            backend=cast(Backend, SimpleNamespace(workers=workers)),
            train_data=task_data.train_data,
            eval_data=None,
            report=SilentReport(),
            run_dir=Path(),
        )
        rate = session.plan().learning_rate_at(Progress())
        return Peer(config, task_data.task, rate, session, place)

    return open_peer


def set_initial_values(peer: Peer, fields: Iterable[Any]) -> None:
    """Give a model the initial values that the config asks for.

    Args:
        peer: the job.
        fields: the arrays of the model, as the framework's ``ModelState`` has them.
    """
    if peer.config.initial_parameters != "portable":
        return
    fields = list(fields)
    values = with_initial_values({field.name: field.read() for field in fields}, peer.config.seed)
    for field in fields:
        field.write(values)


def workers_at(place: Place) -> Any:
    """Return the workers of a program as what reads the data, and chooses the device, sees them."""
    return SimpleNamespace(
        rank=place.rank,
        size=place.size,
        local_rank=place.rank,
        local_size=place.size,
        host=_THIS_HOST,
        is_elastic=False,
        most=place.size,
    )


def check_carried(config: Config, task: Any) -> None:
    """Check that a program can do the same work.

    Raises:
        UsageError: naming what it could not do.
    """
    row = FRAMEWORKS[config.framework]
    found = [
        f"{name}: {getattr(config, name)}"
        for name, field in Config.model_fields.items()
        if name not in _CARRIED | _OF_THE_RUN
        and not field.is_required()
        and getattr(config, name) != field.get_default()
    ]
    if not config.decay_norms_and_biases and not config.weight_decay:  # then it changes nothing
        found = [text for text in found if not text.startswith("decay_norms_and_biases")]
    if config.optimizer not in ("sgd", "adamw"):
        found.append(f"optimizer: {config.optimizer}")
    found += [
        f"the task's {method}" for method in (row.step_method, row.optimizers_method) if hasattr(task, method)
    ]
    if found:
        raise UsageError(
            f"--against cannot compare equal work: the other program does not have {', '.join(found)}",
            "Leave that out, to compare the rest of the job.",
            everywhere=True,
        )


def run_steps(
    peer: Peer,
    step: Callable[[HostBatch], Any],
    read: Callable[[Any], float],
    mean_of: Callable[[float], float],
    steps: int,
) -> dict[str, Any]:
    """Train, and return how long steps take.

    Args:
        peer: the job.
        step: does a step with a batch, and returns its loss as the device has it.
        read: waits for a loss and returns it.
        mean_of: collective; returns the mean of a number over the processes.
        steps: how many steps are timed.
    """
    chunks: list[float] = []
    times = CpuTimes.now(_THIS_HOST)
    seed_host_generators(peer.config.seed, f"step 0, rank {peer.place.rank}")
    with peer.batches() as batches:
        first_loss = mean_of(read(step(next(batches))))
        for _ in range(_WARM_STEPS):
            loss = step(next(batches))
        read(loss)
        for _ in range(max(steps // CHUNK, 3)):
            begun = time.perf_counter()
            for _ in range(CHUNK):
                loss = step(next(batches))
            read(loss)
            chunks.append((time.perf_counter() - begun) / CHUNK)
        times = CpuTimes.now(_THIS_HOST).since(times)
        of_all = mean_of(times.own) * peer.place.size
    return {
        "first_loss": first_loss,
        "chunk_seconds": {"median": statistics.median(chunks), "low": min(chunks), "high": max(chunks)},
        "steps_timed": len(chunks) * CHUNK,
        "warnings": busy_hosts([replace(times, own=of_all)]),
    }
