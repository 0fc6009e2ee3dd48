"""Measuring a job's steps: blocks of them with the other workers and without, in turn."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.config import Config
from hvdtrain.data.readers import Readers
from hvdtrain.errors import UsageError
from hvdtrain.jobs.entering import new_session
from hvdtrain.jobs.opening.setup import TrainingRun, build
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.session import Session
from hvdtrain.tools.blocks import (
    MOST_STEPS,
    SMALL_RATE,
    Recorder,
    bench_config,
    run_block,
    steps_of_block,
    tried_session,
    whole_rounds,
)
from hvdtrain.tools.message_times import bench_module
from hvdtrain.tools.spread import PARTS, Block, Spread, split_of
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import Workers

_FIRST_STEPS = 5  # which show how many fit into the time
_BLOCKS = 5  # with the other workers, and as many without


def check_rounds(config: Config) -> None:
    """Check that a block of steps can hold a synchronisation."""
    if config.sync_every is not None and config.sync_every > MOST_STEPS:
        raise UsageError(
            f"sync_every {config.sync_every}: bench times whole synchronisations, in blocks of at most "
            f"{MOST_STEPS:,} steps",
            f"Measure with --sync-every {MOST_STEPS} or less: a synchronisation takes as long, and a step's "
            "part in it shrinks in proportion.",
            everywhere=True,
        )


def session_alone(run: TrainingRun, plan: TrainingPlan, readers: Readers) -> Session:
    """Return a run of this worker on its own, with batches of the size that it has in the job. Local."""
    config, backend, workers = run.config, run.backend, run.backend.workers
    changes: dict[str, Any] = {
        "global_batch_size": None,
        "batch_size": plan.batch.micro_batch,
        "seed": config.seed + workers.rank,
        # the rate of the job is meant for its global batch, and could let this training diverge
        "learning_rate": SMALL_RATE * config.base_learning_rate,
    }
    run = run.with_config(**changes)
    lone = Workers(workers.host, local_rank=workers.local_rank, local_size=workers.local_size)
    alone: Backend = bench_module(config.framework).backend_alone(run.config, backend, lone)
    build(run.config, run.task_data.task, alone)
    task_data = replace(run.task_data, eval_data=None)
    return new_session(replace(run, backend=alone, task_data=task_data), ResumePoint(), readers)


def measure_steps(run: TrainingRun, *, seconds: float, splits: bool) -> dict[str, Any]:
    """Collective. Train, and return how long steps take, as fields of a job's document."""
    run, workers = run.with_config(bench_config(run.config)), run.backend.workers
    with tried_session(run) as (session, readers, notes):
        sessions = [session]
        if splits and workers.size > 1:
            ACTIVITY.enter("building a second model", is_long=True)
            sessions.append(session_alone(run, session.plan(), readers))
        found = _measure(sessions, seconds, has_parts=len(sessions) > 1 or workers.size == 1)
    return {**found, "notes": [*notes, *found["notes"]]}


def _measure(sessions: Sequence[Session], seconds: float, *, has_parts: bool) -> dict[str, Any]:
    """Collective. Run the blocks of the job, and of each worker on its own if there is a session for it."""
    plan, workers = sessions[0].plan(), sessions[0].backend.workers
    recorders = [Recorder() for _ in sessions]
    for session, recorder in zip(sessions, recorders, strict=True):
        session.services.report = recorder

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
    spreads = {
        "step_seconds": [statistics.median(blocks[0].step_seconds[0]) for blocks in rounds],
        "mean_step_seconds": means,
        "samples_per_second": [plan.batch.global_batch / mean for mean in means],
    }
    parts = {name: [split[name] for split in splits] for name in PARTS} if has_parts else {}
    return {
        "steps_timed": _BLOCKS * steps,
        "first_loss": recorders[0].first_loss or 0.0,
        **{name: Spread.of(values).to_dict() for name, values in spreads.items()},
        "part_seconds": {name: Spread.of(values).to_dict() for name, values in parts.items()},
        "notes": recorders[0].notes,
    }
