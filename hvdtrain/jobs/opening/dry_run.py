"""The dry run: one micro-batch of training and of evaluation data before the first step, and its memory."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.backends.base import Backend
from hvdtrain.backends.memory import MemoryPlan, mebibytes, memory_plan
from hvdtrain.backends.objective.gathering import comparing_error
from hvdtrain.backends.objective.logits import named_loss
from hvdtrain.backends.objective.losses import IGNORE_INDEX
from hvdtrain.backends.objective.objective import has_own_values
from hvdtrain.backends.records import ModelInfo
from hvdtrain.checkpoints.digest import ArrayForm, forms_of
from hvdtrain.data.eval_sets import TRAINING_DATA, by_words, set_words, sets_of
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.readers import LocalFetch
from hvdtrain.data.stream import Stream
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.host.cores import limit_bytes, peak_bytes
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.failures import lack_of_memory
from hvdtrain.jobs.opening import dry_run_checks as checks
from hvdtrain.jobs.opening.dry_run_checks import Pass
from hvdtrain.session import Session
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.seeding import random_state_kept
from hvdtrain.workers.user_errors import task_errors


@dataclass(frozen=True)
class Dry:
    """What a dry run found."""

    passes: Sequence[Pass]  # of the training data and the evaluation sets; none if training is done
    notes: Sequence[str]  # what to report to the user, the same on every worker
    seconds: float  # how long it took


def try_out(session: Session, task: Any, model: ModelInfo) -> Dry:
    """Collective. Do the dry run, which precedes whatever is written, and plan the memory with it."""
    ACTIVITY.enter("in the dry run", is_long=True)
    backend, stages = session.backend, model.stage_shapes
    workers = backend.workers
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
    session.memory = plan = replace(plan, stage=stage + 1) if stages else plan
    found = dry_run(session, task, plan)
    device = backend.device_memory()
    session.memory = plan = replace(plan, taken=peak_bytes() if device is None else device.peak)
    plans: list[MemoryPlan] = workers.allgather_object(plan) if session.config.stages > 1 else [plan]
    session.services.largest_memory = largest = max(plans, key=lambda one: one.total_bytes)
    return replace(found, notes=(*notes_on_memory(largest, backend), *found.notes))


def notes_on_memory(plan: MemoryPlan, backend: Backend) -> list[str]:
    """Return a note if what is planned does not fit into a worker's memory; empty otherwise. Local."""
    limit = memory_limit(backend)
    if limit is None or plan.total_bytes <= limit:
        return []
    whose = "each worker of this host may take" if backend.device_memory() is None else "its GPU has"
    fits = f"the job needs at least {mebibytes(plan.total_bytes)} per worker, and {whose} {mebibytes(limit)}"
    return [f"{fits}; {'; '.join(plan.remedies)}"]


def dry_run(session: Session, task: Any, memory: MemoryPlan | None = None) -> Dry:
    """Collective. Take a batch of training and of evaluation data through everything but the update."""
    # Nothing that training uses is changed. A worker whose batch fails raises at once: the others may wait
    # in a collective of the model, and learn of it when this worker leaves Horovod.
    begun_seconds, workers = time.perf_counter(), session.backend.workers
    again, reused, found = None, None, dict[str, str]()
    with random_state_kept():
        passes = list(_passes(session, task, memory))
        if passes:
            again = session.data.train_batch(session.plan(), session.state.progress)
            data = by_words(session.data.training, session.data.evaluation).items()
            if names := [(words, name) for words, one in data if (name := reused_array(one))]:
                words, name = names[0]
                reused = DataError(
                    f"reading a sample of the {words} changes {name!r} of the one that was read before: both "
                    "lie in the same memory, so all samples of a batch become the last one",
                    "Return an array of its own for each sample, such as buffer.copy().",
                )
    errors = [reused, *(checks.find_error(one, None if one is passes[0] else passes[0]) for one in passes)]
    errors += [comparing_error_of(session, task, one.what, one.comparing) for one in passes]
    for one in passes:
        found |= checks.find_notes(one)
    if again is not None:
        found |= checks.drawn_note(passes[0].arrays, Pass.of("", again, passes[0].result).arrays)
    if passes and passes[0].comparing and session.config.accumulate > 1:
        found["comparing"] = f"{passes[0].comparing}; it sees one micro-batch, and not the whole batch"
    notes = share_findings(workers, next(filter(None, errors), None), found)
    changed = dict(passes[0].result.changed) if passes else {}
    session.backend.replica_state.expect(workers.allgather_object(changed))
    forms: Mapping[str, ArrayForm] = {}  # if the model cannot be compared
    # two results of a random evaluation cannot be compared
    if passes and not any(one.is_random or one.with_row_numbers for one in passes):
        forms = forms_of(passes[min(1, len(passes) - 1)].arrays)
    session.services.forms = workers.broadcast_object(forms, 0)
    return Dry(passes, notes, time.perf_counter() - begun_seconds)


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


def reused_array(dataset: Any) -> str:
    """Return the name of an array whose memory the next sample has, too; empty if there is none."""
    size = 0 if isinstance(dataset, Stream) else len(dataset)
    if size < 2:
        return ""
    fetch, ends = LocalFetch(dataset), np.asarray([0, size - 1])
    try:
        first, _ = fetch(ends[:1])
        kept = {name: array.copy() for name, array in first.items()}
        last = {name: array.copy() for name, array in fetch(ends[1:])[0].items()}
        changed = [name for name in kept if not checks.are_equal(first[name], kept[name])]
        pair, _ = fetch(ends)  # of a batch of the two, both may be the last sample's
        changed += [
            name
            for name, (one, other) in pair.items()
            if checks.are_equal(one, other) and not checks.are_equal(kept[name][0], last[name][0])
        ]
    except Exception:
        return ""  # it is reported when it is read for a step
    return next(iter(changed), "")


def share_findings(workers: Workers, error: HvdtrainError | None, notes: Mapping[str, str]) -> list[str]:
    """Collective. Return the notes of all workers, or raise the error of the first that has one."""
    gathered = workers.allgather_object((error, dict(notes)))
    failed = [(rank, one) for rank, (one, _) in enumerate(gathered) if one is not None]
    if failed:
        rank, first = failed[0]
        place = f" (found on rank {rank})" if len(failed) < workers.size else ""
        raise type(first)(f"{first.problem}{place}", first.remedy, everywhere=True) from error
    texts = {kind: text for _, of_rank in reversed(gathered) for kind, text in of_rank.items()}
    return [texts[kind] for kind in sorted(texts)]


def _passes(session: Session, task: Any, memory: MemoryPlan | None) -> Iterator[Pass]:
    """Collective. Yield the pass of each data set; raise at once if one ends with an exception."""
    plan, config, backend = session.plan(), session.config, session.backend
    row, loss, metrics = FRAMEWORKS[config.framework], None, dict[str, str]()
    if not hasattr(task, row.loss_method):  # one that calls the model has no names
        loss, _ = named_loss(getattr(task, "loss", None), config.framework)
        metrics = {k: kind for k, kind in getattr(task, "metrics", {}).items() if isinstance(kind, str)}
    reads: list[Callable[[], HostBatch | None]] = [
        partial(session.data.train_batch, plan, session.state.progress),
        *(partial(session.data.eval_batch, plan, one) for one in sets_of(session.data.evaluation)),
    ]
    first: Pass | None = None
    for read, (what, dataset) in zip(
        reads, by_words(session.data.training, session.data.evaluation).items(), strict=True
    ):
        with task_errors(f"the first batch of the {what} cannot be read"):
            batch = read()
        if batch is None:  # training is done
            return
        training = what == TRAINING_DATA
        result = backend.dry_run(batch, training=training)
        one = Pass.of(what, batch, result, getattr(task, "ignore_index", IGNORE_INDEX))
        if not (training and hasattr(task, row.step_method)):  # which computes losses of its own
            one.named_loss, one.named_metrics = loss if isinstance(loss, str) else "", metrics
        if result.error is not None:  # the others may wait in a collective of the model
            lack = lack_of_memory(result.error, f"the first batch of the {what} fails", memory)
            if lack is not None:
                raise lack from result.error
            raise checks.find_error(one, first) or result.error
        own = result.refusal is not None, checks.has_row_numbers(dataset, batch)
        of_all = backend.workers.allgather_object(own)  # what follows may have collectives
        is_refused, one.with_row_numbers = map(any, zip(*of_all, strict=True))
        if not is_refused and config.stages == 1:
            _look_at(session, task, one, batch, first)
        first = first or one
        yield one
        if is_refused:
            return


def _look_at(session: Session, task: Any, one: Pass, batch: HostBatch, first: Pass | None) -> None:
    """Collective. Add to a pass what more looks at its batch show."""
    config, evaluated = session.config, partial(session.backend.dry_run, training=False)
    # of one worker it matters to micro-batches alone
    matters = comparing_error_of(session, task, one.what, "it compares") or config.accumulate > 1
    if matters and has_own_values(task, config.framework):
        one.comparing = session.backend.find_comparing(batch, first is None)
    if first is not None:
        again = evaluated(replace(batch, step=batch.step + 1))
        one.note = checks.random_note(one.what, one.result, again, is_half=config.precision != "fp32")
        one.is_random = bool(one.note)
        one.note = one.note or checks.scale_note(one.what, one.arrays, first.arrays)
    elif session.data.evaluation is not None:  # which shows the same of the loss
        return
    # named losses and metrics check shapes themselves
    if not one.with_row_numbers and has_own_values(task, config.framework):
        one.error = checks.find_broadcast(one.what, batch, one.result.outputs, evaluated)


def memory_limit(backend: Backend) -> int | None:
    """Return how much memory this worker may take, on its GPU if it has one; None if that is not known."""
    device = backend.device_memory()
    return limit_bytes(backend.workers.local_size) if device is None else device.limit
