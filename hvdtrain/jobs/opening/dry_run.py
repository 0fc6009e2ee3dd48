"""The dry run: one micro-batch of training and of evaluation data before the first step, and its memory."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.memory import MemoryPlan, mebibytes, memory_plan
from hvdtrain.backends.objective.counting import IGNORE_INDEX
from hvdtrain.backends.objective.gathering import comparing_error
from hvdtrain.backends.objective.logits import named_loss
from hvdtrain.backends.objective.objective import has_own_values
from hvdtrain.backends.records import DryRun, ModelInfo
from hvdtrain.checkpoints.digest import ArrayForm, forms_of
from hvdtrain.data.eval_sets import TRAINING_DATA, set_words, sets_of
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.host.cores import limit_bytes, peak_bytes
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.failures import lack_of_memory
from hvdtrain.jobs.opening.dry_run_checks import Pass, find_error, find_notes
from hvdtrain.jobs.opening.dry_run_looks import (
    drawn_note,
    find_broadcast,
    has_row_numbers,
    random_note,
    reused_memory,
    scale_note,
)
from hvdtrain.session import Session
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.seeding import random_state_kept
from hvdtrain.workers.user_errors import task_errors


@dataclass(frozen=True)
class Dry:
    """What a dry run found."""

    # the training data's, and those of the sets of the evaluation data. Empty if training is done already
    passes: Sequence[Pass]
    notes: Sequence[str]  # what to report to the user, the same on every worker
    seconds: float  # how long it took
    # what stands for a batch in the digest of a checkpoint; empty if the model cannot be compared
    forms: Mapping[str, ArrayForm] = field(default_factory=dict)


def dry_run(session: Session, task: Any, memory: MemoryPlan | None = None) -> Dry:
    """Collective. Take a batch of training and of evaluation data through everything but the update."""
    # Nothing that training uses is changed. A worker whose batch fails raises at once: the others may wait
    # in a collective of the model, and learn of it when this worker leaves Horovod.
    begun_seconds = time.perf_counter()
    with random_state_kept():
        passes = list(_passes(session, task, memory))
        again = session.data.train_batch(session.plan(), session.state.progress) if passes else None
        reused = _reused_memory(session) if passes else None
    errors = [reused, *(find_error(one, passes[0] if place else None) for place, one in enumerate(passes))]
    errors += [comparing_error_of(session, task, one.what, one.comparing) for one in passes]
    error = next((error for error in errors if error), None)
    found = dict(note for one in passes for note in find_notes(one))
    if again is not None:
        found |= drawn_note(passes[0].arrays, Pass.of("", again, passes[0].result, "").arrays)
    if passes and passes[0].comparing and session.config.accumulate > 1:
        found["comparing"] = f"{passes[0].comparing}; it sees one micro-batch, and not the whole batch"
    workers = session.backend.workers
    notes = share_findings(workers, error, found)
    changed = dict(passes[0].result.changed) if passes else {}
    session.backend.replica_state.expect(workers.allgather_object(changed))
    forms: Mapping[str, ArrayForm] = {}
    # two results of a random evaluation cannot be compared
    if passes and not any(one.is_random or one.with_row_numbers for one in passes):
        forms = forms_of(passes[min(1, len(passes) - 1)].arrays)
    forms = workers.broadcast_object(forms, 0)
    return Dry(passes, notes, time.perf_counter() - begun_seconds, forms)


def comparing_error_of(session: Session, task: Any, what: str, comparing: str) -> HvdtrainError | None:
    """Return the error of a loss that compares samples of a batch that several workers share; or None."""
    workers, is_local = session.backend.workers, session.config.sync_every and what == TRAINING_DATA
    if not comparing or is_local or getattr(task, "per_worker_loss", False):
        return None
    return comparing_error(comparing, workers.size) if workers.size > 1 or workers.is_elastic else None


def check_alone(session: Session, task: Any) -> None:
    """Collective. Check that what an evaluation computes of a sample needs no samples of other workers."""
    workers = session.backend.workers
    if workers.size == 1 or not has_own_values(task, session.config.framework):
        return
    error: HvdtrainError | None = None
    for name in sets_of(session.data.evaluation):
        batch, what = session.data.eval_batch(session.plan(), name), set_words(name)
        if batch is not None:
            with random_state_kept():
                failed = session.backend.dry_run(batch, training=False).error
                found = "" if failed else session.backend.find_comparing(batch, training=False)
            error = error or comparing_error_of(session, task, what, found)
    share_findings(workers, error, {})


def _reused_memory(session: Session) -> HvdtrainError | None:
    """Return the error of data that give several samples in the same memory. Local."""
    given = {TRAINING_DATA: session.data.training}
    given |= {set_words(name): dataset for name, dataset in sets_of(session.data.evaluation).items()}
    for words, dataset in given.items():
        if name := reused_memory(dataset):
            return DataError(
                f"reading a sample of the {words} changes {name!r} of the one that was read before: both lie "
                "in the same memory, so all samples of a batch become the last one",
                "Return an array of its own for each sample, such as buffer.copy().",
            )
    return None


def share_findings(workers: Workers, error: HvdtrainError | None, notes: Mapping[str, str]) -> list[str]:
    """Collective. Return the notes of all workers, or raise the error of the first that has one."""
    gathered = workers.allgather_object((error, dict(notes)))
    failed = [(rank, one) for rank, (one, _) in enumerate(gathered) if one is not None]
    if failed:
        rank, first_error = failed[0]
        place = f" (found on rank {rank})" if len(failed) < workers.size else ""
        problem, remedy = f"{first_error.problem}{place}", first_error.remedy
        raise type(first_error)(problem, remedy, everywhere=True) from error
    first = {kind: text for _, of_rank in reversed(gathered) for kind, text in of_rank.items()}
    return [first[kind] for kind in sorted(first)]


def _passes(session: Session, task: Any, memory: MemoryPlan | None) -> Iterator[Pass]:
    """Collective. Yield the pass of each data set; raise at once if one ends with an exception."""
    plan, row = session.plan(), FRAMEWORKS[session.config.framework]
    loss = None if hasattr(task, row.loss_method) else getattr(task, "loss", None)
    if loss is not None:  # a loss object may be that of a name
        loss, _ = named_loss(loss, session.config.framework)
    name = loss if isinstance(loss, str) else ""
    ignored = getattr(task, "ignore_index", IGNORE_INDEX)
    given = {} if hasattr(task, row.loss_method) else getattr(task, "metrics", {})
    metrics = {key: kind for key, kind in given.items() if isinstance(kind, str)}
    sources: list[tuple[str, Any, Callable[[], HostBatch | None]]] = [
        (TRAINING_DATA, session.data.training, lambda: session.data.train_batch(plan, session.state.progress))
    ]
    sources += [
        (set_words(name), dataset, partial(session.data.eval_batch, plan, name))
        for name, dataset in sets_of(session.data.evaluation).items()
    ]
    done: list[Pass] = []
    for what, dataset, read in sources:
        with task_errors(f"the first batch of the {what} cannot be read"):
            batch = read()
        if batch is None:  # training is done
            return
        training = what == TRAINING_DATA
        result = session.backend.dry_run(batch, training=training)
        is_named = not (training and hasattr(task, row.step_method))  # which computes losses of its own
        one = Pass.of(what, batch, result, name if is_named else "", ignored)
        one.named_metrics = metrics if is_named else {}
        if result.error is not None:  # the others may wait in a collective of the model
            lack = lack_of_memory(result.error, f"the first batch of the {what} fails", memory)
            if lack is not None:
                raise lack from result.error
            raise find_error(one, done[0] if done else None) or result.error
        own = result.refusal is not None, has_row_numbers(dataset, batch)
        of_all = session.backend.workers.allgather_object(own)  # what follows may have collectives
        is_refused, one.with_row_numbers = map(any, zip(*of_all, strict=True))
        if not is_refused and session.config.stages == 1:
            # of one worker it matters to micro-batches alone
            matters = comparing_error_of(session, task, what, "it compares") or session.config.accumulate > 1
            if matters and has_own_values(task, session.config.framework):
                one.comparing = session.backend.find_comparing(batch, training)
            _look_at(session, task, one, batch, done[0] if done else None)
        done.append(one)
        yield one
        if is_refused:
            return


def _look_at(session: Session, task: Any, one: Pass, batch: HostBatch, training: Pass | None) -> None:
    """Collective. Add to a pass what more looks at its batch show."""
    config, what, found = session.config, one.what, one.result

    def evaluated(batch: HostBatch) -> DryRun:
        return session.backend.dry_run(batch, training=False)

    if training is not None:
        again = evaluated(replace(batch, step=batch.step + 1))
        random = random_note(what, found, again, is_half=config.precision != "fp32")
        one.note, one.is_random = random or scale_note(what, one.arrays, training.arrays), bool(random)
    elif session.data.evaluation is not None:  # which shows the same of the loss
        return
    # named losses and metrics check shapes themselves
    if not one.with_row_numbers and has_own_values(task, config.framework):
        one.error = find_broadcast(what, batch, found.outputs, evaluated)


def plan_memory(session: Session, model: ModelInfo) -> MemoryPlan:
    """Return the memory that each worker takes: of a split model, with this worker's stage. Local."""
    workers, stages = session.backend.workers, model.stage_shapes
    stage = workers.rank % len(stages) if stages else 0
    plan = memory_plan(
        stages[stage] if stages else model.parameter_shapes,
        session.config,
        workers=workers.size,
        is_elastic=workers.is_elastic,
        frozen_parameters=model.frozen_parameters,
        micro_batch=session.plan().batch.micro_batch,
        own_slots=None if model.own_rates is None else model.slot_bytes,
    )
    return replace(plan, stage=stage + 1) if stages else plan


def tried_plan(session: Session) -> MemoryPlan:
    """Return this worker's plan with what it has taken by now. Local: no collective."""
    plan, device = session.memory.own, session.backend.device_memory()
    assert plan is not None  # made before the dry run
    return replace(plan, taken=peak_bytes() if device is None else device.peak)


def heaviest_plan(session: Session, plan: MemoryPlan) -> MemoryPlan:
    """Collective if the model is split. Return the plan of the worker that takes most; else this worker's."""
    if session.config.stages == 1:
        return plan
    plans: list[MemoryPlan] = session.backend.workers.allgather_object(plan)
    return max(plans, key=lambda one: one.total_bytes)


def memory_limit(backend: Backend) -> int | None:
    """Return how much memory this worker may take, on its GPU if it has one; None if that is not known."""
    device = backend.device_memory()
    return limit_bytes(backend.workers.local_size) if device is None else device.limit


def notes_on_memory(plan: MemoryPlan, backend: Backend) -> list[str]:
    """Return a note if what is planned does not fit into a worker's memory; empty otherwise. Local."""
    limit = memory_limit(backend)
    if limit is None or plan.total_bytes <= limit:
        return []
    whose = "each worker of this host may take" if backend.device_memory() is None else "its GPU has"
    fits = f"the job needs at least {mebibytes(plan.total_bytes)} per worker, and {whose} {mebibytes(limit)}"
    return [f"{fits}; {'; '.join(plan.remedies)}"]
