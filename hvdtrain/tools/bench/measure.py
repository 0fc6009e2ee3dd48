"""Measuring a job's steps: blocks of them with the other workers and without, in turn."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from hvdtrain.tools.bench.spread import Block, Spread, split_of, split_of_one, spread_of_parts
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seed_host_generators

_WARM_STEPS = 3  # at the start of a block: the data are not read ahead yet

Own = tuple[list[float], float]  # a worker's step times, and how long it waited for data in a step


class Recorder(Report):
    """A report that keeps what the metrics of steps say.

    Attributes:
        first_loss: the loss of the first step.
        wait_seconds: of each step of the current block, how long all workers together waited for data.
        notes: what the training told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_loss: float | None = None
        self.wait_seconds: list[float] = []
        self.notes: list[str] = []

    def begin(self) -> None:
        """Begin a block."""
        self.wait_seconds.clear()

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

    recorder.begin()
    session.wanted = session.unsent = NO_FLAGS
    run_loop(session, poll_signals)
    timed = stamps[warm : warm + steps + 1]
    if len(timed) <= steps:
        raise RuntimeError(f"a block of {steps} steps ended after {len(stamps)}")
    waits = recorder.wait_seconds[warm + 1 : warm + steps + 1]
    workers = session.backend.workers.size
    seconds = [(after - before) / every for before, after in pairwise(timed[::every])]
    return seconds, sum(waits) / workers / steps


def whole_rounds(steps: int, every: int) -> int:
    """Return the least number of steps that ends with a synchronisation, and is not less than given."""
    return -(-steps // every) * every


def joined(of_ranks: list[Own]) -> Block:
    """Return what all workers measured of a block, in the order of ranks."""
    return Block([seconds for seconds, _ in of_ranks], [waited for _, waited in of_ranks])


_RATE_FACTOR = 1e-3


def session_alone(
    config: Config, backend: Backend, task_data: TaskData, plan: TrainingPlan, readers: Readers
) -> Session:
    """Return a run of this worker on its own, with batches of the size that it has in the job. Local.

    It has a model of its own, and reads other samples than the other workers do.

    Args:
        config: the job's config.
        backend: the job's backend.
        task_data: the task with its data.
        plan: the job's plan.
        readers: the processes that read samples.
    """
    config = config.model_copy(
        update={
            "global_batch_size": None,
            "batch_size": plan.batch.micro_batch,
            "seed": config.seed + backend.workers.rank,
            # the rate of the job is meant for its global batch, and could let this training diverge
            "learning_rate": _RATE_FACTOR * config.base_learning_rate,
        }
    )
    workers = backend.workers
    lone = LoneWorker(workers.host, local_rank=workers.local_rank, local_size=workers.local_size)
    alone: Backend = bench_module(config.framework).backend_alone(config, backend, lone)
    build(config, task_data.task, alone)
    return new_session(config, alone, replace(task_data, eval_data=None), ResumePoint(), readers)


_FIRST_STEPS = 5  # which tell how many fit into the time
_BLOCKS = 5  # with the other workers, and as many without
CHUNK = 10  # steps that are timed together where programs are compared
_LEAST_STEPS, _MOST_STEPS = CHUNK, 1000  # of a block
_LONG_SECONDS, _LEAST_LONG_STEPS = 1.0, 3  # where steps are so long, a block may have fewer
_ENDLESS = 10**9
_SMALL_RATE = 1e-3  # of the learning rate, where a training skips its warm-up


@dataclass(frozen=True)
class Steps:
    """What was measured of a job's steps.

    Attributes:
        step_seconds: how long a step takes: the blocks' medians.
        samples_per_second: of all workers together.
        chunk_seconds: the same from chunks of steps, which other programs are timed in.
        parts: the parts of the step's time, by name; empty if they were not measured.
        blocks: the blocks' means in seconds, in order.
        steps: how many steps were timed.
        first_loss: the loss of the first step; of local steps, the mean up to the first synchronisation.
        notes: what the training told.
        alone: the blocks without the other workers; those of the job if it has one worker, and none if they
            were not measured.
    """

    step_seconds: Spread
    chunk_seconds: Spread
    samples_per_second: Spread
    parts: dict[str, Spread]
    blocks: list[float]
    steps: int
    first_loss: float
    notes: Sequence[str] = field(default=())
    alone: Sequence[Block] = field(default=())


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
        rate = _SMALL_RATE * config.base_learning_rate  # without a warm-up, the job's could diverge
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
        alone = None
        if splits and workers.size > 1:
            ACTIVITY.enter("building a second model", is_long=True)
            alone = session_alone(config, backend, task_data, session.plan(), readers)
        measured = _measure(session, alone, seconds)
    return replace(measured, notes=(*notes, *measured.notes))


def _measure(session: Session, alone: Session | None, seconds: float) -> Steps:
    """Collective. Run the blocks."""
    workers = session.backend.workers
    recorder, others = Recorder(), Recorder()
    session.report = recorder
    runs = [_block_of(session, recorder)]
    if alone is not None:
        alone.report = others
        runs.append(_block_of(alone, others))
    found = [workers.allgather_object(run(_FIRST_STEPS)) for run in runs]
    first = max(statistics.median(block_seconds) for of_ranks in found for block_seconds, _ in of_ranks)
    every = session.plan().sync_every
    steps = whole_rounds(steps_of_block(seconds / (_BLOCKS * len(runs)), first), every)
    pairs: list[list[Block]] = []
    for _ in range(_BLOCKS):
        pairs.append([joined(workers.allgather_object(run(steps))) for run in runs])
    of_job = [pair[0] for pair in pairs]
    splits = [split_of(*pair) if len(pair) == 2 else split_of_one(pair[0]) for pair in pairs]
    medians = [statistics.median(block.step_seconds[0]) for block in of_job]
    means = [block.mean_seconds for block in of_job]
    batch = session.plan().batch.global_batch
    return Steps(
        Spread.of(medians),
        Spread.of([seconds for block in of_job for seconds in block.chunks(-(-min(CHUNK, steps) // every))]),
        Spread.of([batch / mean for mean in means]),
        spread_of_parts(splits) if alone is not None or workers.size == 1 else {},
        means,
        _BLOCKS * steps,
        recorder.first_loss or 0.0,
        recorder.notes,
        [pair[-1] for pair in pairs] if alone is not None or workers.size == 1 else [],
    )


def steps_of_block(seconds: float, step_seconds: float) -> int:
    """Return how many steps a block has.

    Args:
        seconds: how long the block should last.
        step_seconds: how long a step takes.
    """
    least = _LEAST_STEPS if step_seconds < _LONG_SECONDS else _LEAST_LONG_STEPS
    return min(max(round(seconds / max(step_seconds, 1e-6)), least), _MOST_STEPS)


def _block_of(session: Session, recorder: Recorder) -> Callable[[int], Any]:
    return lambda steps: run_block(session, recorder, steps)
