"""Measuring what a plan is computed from, in the processes that a launcher started."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from hvdtrain.backends.base import Backend, ModelInfo
from hvdtrain.backends.reduction.local_steps import in_parts
from hvdtrain.backends.reduction.low_rank import matrix_shape
from hvdtrain.backends.reduction.shards import divide
from hvdtrain.config import Config, Layer
from hvdtrain.config.values import rank_of
from hvdtrain.jobs import compatibility
from hvdtrain.jobs.features import Job
from hvdtrain.jobs.opening.limits import with_learning_rate
from hvdtrain.jobs.opening.setup import JobSpec, TaskData, open_together, prepare, started
from hvdtrain.jobs.signals import interruptible
from hvdtrain.tools.bench.forecast import Measured, Way
from hvdtrain.tools.bench.job import CpuTimes, busy_hosts, notes_on
from hvdtrain.tools.bench.measure import measure_steps
from hvdtrain.tools.bench.message_times import LEAST_BYTES, MOST_BYTES, bench_module, measure_messages
from hvdtrain.tools.bench.plan_result import Record
from hvdtrain.tools.bench.plan_scope import check_hosts
from hvdtrain.tools.bench.spread import Spread
from hvdtrain.tools.bench.worker import layers_from_json, run_worker
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seeded_frameworks

Shapes = Iterable[tuple[int, ...]]


def way_of(config: Config, shapes: Sequence[tuple[int, ...]], *, on_gpu: bool) -> Way:
    """Return the messages of a step.

    Args:
        config: the config of the job.
        shapes: of the parameters.
        on_gpu: whether the job computes on GPUs: then there may be several buffers of gradients.
    """
    if config.sync_every is not None:
        slots = 2 if config.optimizer in ("adamw", "lamb") else int(bool(config.momentum))
        return local_steps(shapes, config.sync_every, slots)
    rank = rank_of(config.compression)
    if rank is not None:
        return low_rank(shapes, rank)
    return buffers(shapes, config.compression, on_gpu=on_gpu)


def buffers(shapes: Shapes, compression: str = "none", *, on_gpu: bool = False) -> Way:
    """Return the way of gradients in buffers; in fp32 the metrics travel with them."""
    sizes = {str(number): 4 * prod(shape) for number, shape in enumerate(shapes)}
    buckets = divide(dict(reversed(sizes.items())), on_gpu)
    share = 2 if compression == "fp16" else 1
    sent = tuple(sum(sizes[name] for name in names) // share for names in buckets)
    return Way(compression, sent, small=share - 1)


def low_rank(shapes: Shapes, rank: int) -> Way:
    """Return the way of PowerSGD after the warm-up: the products and other gradients first, then the factors.

    The metrics travel in the last message.
    """
    products = factors = others = 0
    for shape in shapes:
        matrix = matrix_shape(shape, rank)
        if matrix is None:
            others += prod(shape)
        else:
            products += matrix[0] * rank
            factors += matrix[1] * rank
    sizes = [4 * (products + others), 4 * factors]
    return Way(f"powersgd:{rank}", tuple(filter(None, sizes)), agreements=2 if factors else 1)


def local_steps(shapes: Shapes, every: int, slots: int) -> Way:
    """Return the way of local steps: the parameters and what the optimizer keeps, and then the metrics.

    Args:
        shapes: of the parameters.
        every: steps from one synchronisation to the next.
        slots: tensors of a parameter's size that the optimizer keeps for it.
    """
    tensors = [4 * prod(shape) for shape in shapes for _ in range(1 + slots)]
    parts = in_parts([("", size) for size in tensors])
    sizes = tuple(sum(tensors[place] for place in part) for part in parts)
    return Way(f"sync-every {every}", sizes, small=1, agreements=len(sizes) + 1, every=every)


_LEAST_LARGE = 1 << 20  # bytes, which take measurably longer than a few


def measure_job(
    layers: list[Layer], seconds: float, check: Callable[[int, int], None] = lambda hosts, slots: None
) -> Record | None:
    """Collective. Measure a job as its config has it; return what was found on rank 0, None on other ranks.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        seconds: how long to train, roughly.
        check: gets the numbers of hosts and of workers of one, and raises if they cannot be used.

    Raises:
        UsageError: If the job has what a plan does not predict.
        HvdtrainError: as training would raise it.
    """
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers, None)
        compatibility.check(Job(job.config, command="plan"))
        if job.config.profile is not None:  # a recording takes time
            job = replace(job, config=job.config.model_copy(update={"profile": None}))
        with started(job, signals) as backend, signals.signals_take_precedence():
            task_data, model, hosts = open_together(job, backend)
            check_hosts(hosts, backend.workers.allgather_object(backend.workers.local_size))
            check(len(set(hosts)), max(Counter(hosts).values()))
            compatibility.check(Job(job.config, task_data.task, command="plan"))
            bench_module(job.config.framework).check_dense(backend)
            job = replace(job, config=with_learning_rate(job.config, model.own_rates))
            return _measured(job, backend, task_data, model, hosts, seconds=seconds)


def _measured(
    job: JobSpec,
    backend: Backend,
    task_data: TaskData,
    model: ModelInfo,
    hosts: Sequence[str],
    *,
    seconds: float,
) -> Record | None:
    """Collective. Measure."""
    workers, config = backend.workers, job.config
    before = CpuTimes.now(workers.host)
    steps = measure_steps(job, backend, task_data, seconds=seconds, splits=True)
    on_gpu = not backend.info.description.endswith(" on the CPU")
    way = way_of(config, list(model.parameter_shapes.values()), on_gpu=on_gpu)
    large = min(max(*way.sizes, _LEAST_LARGE), MOST_BYTES)
    few, many = measure_messages(
        workers, config.framework, on_gpu=on_gpu, sizes=(LEAST_BYTES, large), seconds=math.inf
    )
    ACTIVITY.enter("ending the measurement", is_long=True)
    times = workers.allgather_object(CpuTimes.now(workers.host).since(before))
    if workers.rank:
        return None
    per_host = Counter(hosts)
    batch = TrainingPlan.of(config, workers.size, len(task_data.train_data)).batch.global_batch
    measured = Measured(
        workers=workers.size,
        hosts=len(per_host),
        slots=max(per_host.values()),
        controller=workers.controller,
        on_gpu=on_gpu,
        samples=batch / workers.size,
        way=way,
        step=Spread.of(steps.blocks),
        data=steps.parts["data"],
        compute=steps.parts["compute"],
        slowest=steps.parts["slowest"],
        smallest=few.seconds,
        byte=seconds_of_a_byte(few.seconds, many.seconds, many.size - LEAST_BYTES),
    )
    warnings = busy_hosts(times)
    if steps.parts["communication"].median < 0:
        warnings.append(
            "steps of the job are shorter than those of its workers on their own, so something disturbed the "
            "measurement: measure on an idle machine"
        )
    notes = [*job.notes, *model.notes, *task_data.notes, *steps.notes, *notes_on(config)]
    return Record(config.task, backend.info.description, measured, warnings, notes)


def seconds_of_a_byte(few: Spread, many: Spread, size: int) -> Spread:
    """Return by how much each of so many bytes makes a sum longer."""
    found = [max(0.0, more - less) / size for more, less in zip(_ends(many), _ends(few), strict=True)]
    return Spread(found[0], min(found), max(found))


def _ends(seconds: Spread) -> tuple[float, float, float]:
    return seconds.median, seconds.low, seconds.high


def work(specification: dict[str, Any]) -> None:
    """Collective. Measure the job that a specification names, and write what was found, on rank 0."""
    record = measure_job(layers_from_json(specification["layers"]), specification["seconds"])
    if record is not None:
        Path(specification["found"]).write_text(json.dumps(record.to_document()), encoding="utf-8")


if __name__ == "__main__":
    run_worker(work)
