"""The memory of a job: its plan, what a dry run adds to it, and whether that fits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.backends.base import Backend, device_memory
from hvdtrain.backends.memory import (
    MeasuredMemory,
    MemoryPlan,
    exchange_bytes,
    memory_plan,
    saving_bytes,
    update_bytes,
)
from hvdtrain.backends.records import ModelInfo
from hvdtrain.config import Config
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.host.cores import limit_bytes, peak_bytes, release_unused, resident_bytes
from hvdtrain.jobs.opening.checkpoint_config import find_unverified
from hvdtrain.jobs.opening.dry_run import Dry
from hvdtrain.session import Session
from hvdtrain.storage.urls import is_url
from hvdtrain.workers.agreement import Workers, run_on_rank_zero


def with_cuts_before(config: Config, workers: Workers) -> Config:
    """Collective if the model is split. Return the config with the cuts of the checkpoint that it resumes.

    It stays as it is if it has cuts, or if that checkpoint is of the other framework, whose blocks may be
    others, or of another number of stages.
    """
    if config.stages == 1 or config.stage_cuts is not None or config.resume is None:
        return config
    place = str(config.run_dir if config.resume == "auto" else config.resume)

    def find() -> list[int] | None:
        try:
            made = find_unverified(place if is_url(place) else Path(place)).manifest.config
        except (CheckpointError, EnvironmentFault):  # what is wrong is said when it is read
            return None
        is_alike = (made.get("framework"), made.get("stages")) == (config.framework, config.stages)
        return made.get("stage_cuts") if is_alike else None

    cuts = run_on_rank_zero(workers, find, doing="looking for the checkpoint")
    return config if cuts is None else config.model_copy(update={"stage_cuts": tuple(cuts)})


def with_cuts_of(config: Config, model: ModelInfo) -> Config:
    """Return the config with the cuts that a model has, so that whoever uses it again has the same."""
    return config.model_copy(update={"stage_cuts": model.stage_cuts}) if model.stage_cuts else config


def plan_memory(session: Session, model: ModelInfo, measured: MeasuredMemory | None = None) -> MemoryPlan:
    """Return the memory that each worker takes. Local: no collective.

    Of a split model, it is that of this worker's stage.

    Args:
        session: the run.
        model: what is known of the model.
        measured: what was measured before the first step; None before that: then the plan is without it.
    """
    stages = model.stage_shapes
    if not stages:
        return _plan_of(session, model, model.parameter_shapes, measured)
    stage = session.backend.workers.rank % len(stages)
    return replace(_plan_of(session, model, stages[stage], measured), stage=stage + 1)


def _plan_of(
    session: Session,
    model: ModelInfo,
    shapes: Mapping[str, Sequence[int]],
    measured: MeasuredMemory | None = None,
) -> MemoryPlan:
    """Return the memory that a worker takes which has the parameters of these shapes."""
    workers = session.backend.workers
    return memory_plan(
        shapes,
        session.config,
        workers=workers.size,
        is_elastic=workers.is_elastic,
        frozen_parameters=model.frozen_parameters,
        micro_batch=session.plan().batch.micro_batch,
        own_slots=None if model.own_rates is None else model.slot_bytes,
        measured=measured,
    )


def heaviest_plan(session: Session, plan: MemoryPlan) -> MemoryPlan:
    """Collective if the model is split. Return the plan of the worker that takes most; else this worker's."""
    if session.config.stages == 1:
        return plan
    plans: list[MemoryPlan] = session.backend.workers.allgather_object(plan)
    most_needed = max(one.needed_bytes for one in plans)
    return replace(max(plans, key=lambda one: one.total_bytes), most_needed=most_needed)


def measured_plan(session: Session, model: ModelInfo, found: Dry, peak_before: int) -> MemoryPlan:
    """Return the job's memory with what a dry run has found. Local: no collective.

    It gives the system back what the dry run has left, so that what is resident is what stays.

    Args:
        session: the run.
        model: what is known of the model.
        found: what the dry run found.
        peak_before: the most that this process had had before it.
    """
    release_unused()
    plan = plan_memory(session, model)
    first = found.passes[0] if found.passes else None
    if first is None or (memory := first.result.memory) is None:
        return plan
    config, samples = session.config, session.plan().batch.micro_batch
    half = -(-samples // 2)
    per_sample = memory.activations / samples
    if found.half is not None and found.half.activations < memory.activations:
        per_sample = (memory.activations - found.half.activations) / (samples - half)
    device = device_memory(session.backend)
    if device is not None:
        measured = MeasuredMemory(memory.activations, per_sample, None, device.peak, largest=memory.largest)
        return plan_memory(session, model, measured)
    peak, resident = peak_bytes(), resident_bytes()
    known = resident + plan.parts["gradients"] + memory.activations
    # rank 0 gathers the state of all stages
    everything = {name: shape for one in model.stage_shapes for name, shape in one.items()}
    whole = _plan_of(session, model, everything) if everything else plan
    batch = config.accumulate * sum(array.nbytes for array in first.arrays.values())
    measured = MeasuredMemory(
        memory.activations,
        per_sample,
        resident,
        peak,
        workspace=min(max(0, peak - known), memory.activations) if peak > peak_before else 0,
        compiling=memory.compiling + update_bytes(plan, config),
        idle=memory.idle,
        batches=batch * (max(config.read_threads, config.read_workers) + 3),
        saving=saving_bytes(whole, config) if session.backend.workers.rank == 0 else 0,
        exchange=exchange_bytes(plan, config, session.backend.workers.size // config.stages),
        largest=memory.largest,
        saves_in_file=config.stages > 1 or (config.shard != "none" and session.backend.workers.size > 1),
    )
    return plan_memory(session, model, measured)


def memory_limit(backend: Backend) -> int | None:
    """Return how much memory this worker may take, on its GPU if it has one; None if that is not known."""
    device = device_memory(backend)
    return limit_bytes(backend.workers.local_size) if device is None else device.limit


def notes_on_memory(plan: MemoryPlan, backend: Backend) -> list[str]:
    """Return a note if what is planned does not fit into a worker's memory; empty otherwise. Local.

    Args:
        plan: the job's memory, of the worker that takes most.
        backend: the backend, whose worker's limit counts.
    """
    limit = memory_limit(backend)
    text = "" if limit is None else plan.exceeds(limit)
    return [f"{text}; {'; '.join(plan.remedies)}"] if text else []
