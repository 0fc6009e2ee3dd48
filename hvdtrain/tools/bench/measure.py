"""Measuring a job's steps: blocks of them with the other workers and without, in turn."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.reduction.low_rank import has_warmup
from hvdtrain.bench.alone import session_alone
from hvdtrain.bench.blocks import Recorder, joined, run_block, whole_rounds
from hvdtrain.bench.step_split import Block, split_of, split_of_one, spread_of_parts
from hvdtrain.compression import rank_of
from hvdtrain.config import Config
from hvdtrain.errors import UsageError
from hvdtrain.jobs.opening.dry_run import dry_run
from hvdtrain.jobs.opening.setup import JobSpec, TaskData
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.training_run import new_session
from hvdtrain.session import Session, readers_for
from hvdtrain.tools.bench.spread import Spread
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seed_host_generators

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
