"""Measuring a job's steps: blocks of them with the other workers and without, in turn."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.reduction.local_steps import LoneWorker
from hvdtrain.backends.reduction.low_rank import has_warmup
from hvdtrain.backends.step_metrics import NO_FLAGS, ControlFlags, StepMetrics
from hvdtrain.config import Config
from hvdtrain.config.values import rank_of
from hvdtrain.data.readers import Readers
from hvdtrain.errors import UsageError
from hvdtrain.jobs.opening.dry_run import dry_run
from hvdtrain.jobs.opening.setup import JobSpec, TaskData, build
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.training_run import new_session
from hvdtrain.loop import run as run_loop
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.report import Report
from hvdtrain.session import Session, readers_for
from hvdtrain.tools.bench.message_times import bench_module
from hvdtrain.tools.bench.spread import PARTS, Block, Spread, split_of
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seed_host_generators

_WARM_STEPS = 3  # at the start of a block: the data are not read ahead yet
_FIRST_STEPS = 5  # which show how many fit into the time
_BLOCKS = 5  # with the other workers, and as many without
_LEAST_STEPS, _MOST_STEPS = 10, 1000  # of a block
_LONG_SECONDS, _LEAST_LONG_STEPS = 1.0, 3  # where steps are so long, a block may have fewer
_ENDLESS = 10**9
_SMALL_RATE = 1e-3  # of the learning rate, where a model must not diverge

Own = tuple[
    list[float], float
]  # a worker's step times, and how long all waited for data in a step on average


class Recorder(Report):
    """A report that keeps what the metrics of steps say.

    Attributes:
        first_loss: the loss of the first step.
        wait_seconds: of each step of the current block, how long all workers together waited for data.
        notes: the notes of the training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_loss: float | None = None
        self.wait_seconds: list[float] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep a note."""
        self.notes.append(text)

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Keep what a step's metrics say; local steps share what is known of all of them together."""
        if self.first_loss is None:
            self.first_loss = metrics.mean("loss")
        self.wait_seconds += step.steps * [metrics.statistics.data_wait_seconds / step.steps]


def run_block(session: Session, recorder: Recorder, steps: int) -> Own:
    """Collective unless the session has one worker. Train some steps and return how long each of them took.

    A step lasts from the moment when its batch is there to the one when the next step's batch is. Local steps
    are timed together, up to the next one after a synchronisation: each of these times is their mean.

    Args:
        session: the run; its report is the recorder.
        recorder: the report.
        steps: how many steps are timed; some more run before and after them. With local steps they are
            rounded up to whole synchronisations.
    """
    every = session.plan().sync_every
    warm, steps = whole_rounds(_WARM_STEPS, every), whole_rounds(steps, every)
    stamps: list[float] = []

    def poll_signals() -> ControlFlags:
        stamps.append(time.perf_counter())
        return ControlFlags(stop=len(stamps) > warm + steps)

    recorder.wait_seconds.clear()
    session.wanted = session.unsent = NO_FLAGS
    run_loop(session, poll_signals)
    timed = stamps[warm : warm + steps + 1]
    if len(timed) <= steps:
        raise RuntimeError(f"a block of {steps} steps ended after {len(stamps)}")
    waits = recorder.wait_seconds[warm + 1 : warm + steps + 1]
    seconds = [(after - before) / every for before, after in pairwise(timed[::every])]
    return seconds, sum(waits) / session.backend.workers.size / steps


def whole_rounds(steps: int, every: int) -> int:
    """Return the least number of steps that ends with a synchronisation, and is not less than given."""
    return -(-steps // every) * every


@dataclass(frozen=True)
class Steps:
    """What was measured of a job's steps.

    Attributes:
        seconds: how long a step takes: the blocks' medians.
        means: the blocks' mean steps.
        speed: samples/s of all workers together.
        parts: the parts of the mean step, by name; empty if they were not measured.
        count: how many steps were timed.
        first_loss: the loss of the first step; of local steps, the mean up to the first synchronisation.
        notes: the notes of the training.
    """

    seconds: Spread
    means: Spread
    speed: Spread
    parts: dict[str, Spread]
    count: int
    first_loss: float
    notes: Sequence[str] = ()


def bench_config(config: Config) -> Config:
    """Return the config of a job that trains without an end and leaves nothing behind.

    Evaluations, checkpoints, logs, the recording of steps and comparisons of the workers' parameters are left
    out, and so is a warm-up of the learning rate during which PowerSGD would not compress.
    """
    changes: dict[str, Any] = {
        "epochs": None, "steps": _ENDLESS, "resume": None, "run_dir": None, "save_every": None,
        "keep_best": None, "early_stopping": None, "trace_indices": False, "check_replicas_every": _ENDLESS,
        "profile": None,
    }  # fmt: skip
    if config.lr_schedule == "plateau":  # which needs evaluations
        changes["lr_schedule"] = "constant"
    if skips_warmup(config):
        rate = _SMALL_RATE * config.base_learning_rate
        changes |= {"warmup_epochs": 0.0, "warmup_steps": None, "learning_rate": rate}
    return config.model_copy(update=changes)


def skips_warmup(config: Config) -> bool:
    """Return whether a job is measured without its warm-up, since gradients are only compressed after it."""
    return rank_of(config.compression) is not None and has_warmup(config)


def check_rounds(config: Config) -> None:
    """Check that a block of steps can hold a synchronisation.

    Raises:
        UsageError: If there are too many local steps before one.
    """
    if config.sync_every is not None and config.sync_every > _MOST_STEPS:
        raise UsageError(
            f"sync_every {config.sync_every}: bench times whole synchronisations, in blocks of at most "
            f"{_MOST_STEPS:,} steps",
            f"Measure with --sync-every {_MOST_STEPS} or less: a synchronisation takes as long, and a step's "
            "part in it shrinks in proportion.",
            everywhere=True,
        )


def session_alone(
    config: Config, backend: Backend, task_data: TaskData, plan: TrainingPlan, readers: Readers
) -> Session:
    """Return a run of this worker on its own, with batches of the size that it has in the job. Local.

    It has a model of its own, and reads other samples than the other workers do.
    """
    workers = backend.workers
    changes = {
        "global_batch_size": None,
        "batch_size": plan.batch.micro_batch,
        "seed": config.seed + workers.rank,
        # the rate of the job is meant for its global batch, and could let this training diverge
        "learning_rate": _SMALL_RATE * config.base_learning_rate,
    }
    config = config.model_copy(update=changes)
    lone = LoneWorker(workers.host, local_rank=workers.local_rank, local_size=workers.local_size)
    alone: Backend = bench_module(config.framework).backend_alone(config, backend, lone)
    build(config, task_data.task, alone)
    return new_session(config, alone, replace(task_data, eval_data=None), ResumePoint(), readers)


def measure_steps(
    job: JobSpec, backend: Backend, task_data: TaskData, *, seconds: float, splits: bool
) -> Steps:
    """Collective. Train, and return how long steps take.

    Args:
        job: the job, whose local steps ``check_rounds`` has accepted.
        backend: its backend, with the model built.
        task_data: the task with its data.
        seconds: how long to train, roughly.
        splits: whether to measure the parts of a step, for which a second model is built.
    """
    config, workers = bench_config(job.config), backend.workers
    task_data = replace(task_data, eval_data=None)
    restore(config, backend, len(task_data.train_data))
    seed_host_generators(config.seed, f"step 0, rank {workers.rank}")
    with readers_for(config, task_data.train_data, None) as readers:
        session = new_session(config, backend, task_data, ResumePoint(), readers)
        ACTIVITY.enter("in the dry run", is_long=True)
        notes = dry_run(session, task_data.task).notes
        sessions = [session]
        if splits and workers.size > 1:
            ACTIVITY.enter("building a second model", is_long=True)
            sessions.append(session_alone(config, backend, task_data, session.plan(), readers))
        found = _measure(sessions, seconds, has_parts=len(sessions) > 1 or workers.size == 1)
    return replace(found, notes=(*notes, *found.notes))


def _measure(sessions: Sequence[Session], seconds: float, *, has_parts: bool) -> Steps:
    """Collective. Run the blocks of the job, and of each worker on its own if there is a session for it."""
    plan, workers = sessions[0].plan(), sessions[0].backend.workers
    recorders = [Recorder() for _ in sessions]
    for session, recorder in zip(sessions, recorders, strict=True):
        session.report = recorder

    def run(place: int, steps: int) -> Block:
        of_ranks = workers.allgather_object(run_block(sessions[place], recorders[place], steps))
        return Block([own for own, _ in of_ranks], statistics.fmean(waited for _, waited in of_ranks))

    places = range(len(sessions))
    first = [run(place, _FIRST_STEPS) for place in places]
    longest = max(statistics.median(own) for block in first for own in block.step_seconds)
    steps = steps_of_block(seconds / (_BLOCKS * len(sessions)), longest)
    steps = whole_rounds(steps, plan.sync_every)
    rounds = [[run(place, steps) for place in places] for _ in range(_BLOCKS)]
    splits = [split_of(blocks[0], blocks[1] if len(blocks) > 1 else None) for blocks in rounds]
    means = [blocks[0].mean_seconds for blocks in rounds]
    return Steps(
        Spread.of([statistics.median(blocks[0].step_seconds[0]) for blocks in rounds]),
        Spread.of(means),
        Spread.of([plan.batch.global_batch / mean for mean in means]),
        {name: Spread.of([split[name] for split in splits]) for name in PARTS} if has_parts else {},
        _BLOCKS * steps,
        recorders[0].first_loss or 0.0,
        recorders[0].notes,
    )


def steps_of_block(seconds: float, step_seconds: float) -> int:
    """Return how many steps a block has that should last so many seconds."""
    least = _LEAST_STEPS if step_seconds < _LONG_SECONDS else _LEAST_LONG_STEPS
    return min(max(round(seconds / max(step_seconds, 1e-6)), least), _MOST_STEPS)
