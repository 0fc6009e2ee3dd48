"""Measuring what a plan is computed from, in the processes that a launcher started."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hvdtrain.activity import ACTIVITY
from hvdtrain.agreement import Workers
from hvdtrain.backends.base import Backend, ModelInfo
from hvdtrain.bench.alone import bench_module
from hvdtrain.bench.job import notes_on
from hvdtrain.bench.machine import CpuTimes, busy_hosts
from hvdtrain.bench.measure import measure_steps
from hvdtrain.bench.message_times import MOST_BYTES, measure_messages
from hvdtrain.bench.predict import Measured
from hvdtrain.bench.predict_curve import ENDS, Curve
from hvdtrain.bench.predict_notes import notes_on_sizes
from hvdtrain.bench.predict_record import Record
from hvdtrain.bench.predict_scope import Others, check_hosts, check_predictable, check_task, check_workers
from hvdtrain.bench.predict_waiting import deviations_of, lag_of
from hvdtrain.bench.predict_ways import Way, half, local_steps, low_rank, slots_of, uncompressed
from hvdtrain.bench.spread import Spread
from hvdtrain.config import Config, Layer
from hvdtrain.jobs.learning_rate import with_learning_rate
from hvdtrain.jobs.setup import JobSpec, TaskData, open_together, prepare, started
from hvdtrain.jobs.signals import interruptible
from hvdtrain.seeding import seeded_frameworks
from hvdtrain.training_plan import TrainingPlan

_MESSAGE_SECONDS = 20.0
_LEAST_BYTES = 1 << 20  # so that the curve has a slope
_LEAST_REPEATS, _ENCODE_REPEATS = 3, 15
_ENCODE_SECONDS = 20.0
_MOST_DEVIATIONS = 2000


def measure_job(
    layers: list[Layer],
    seconds: float,
    check: Callable[[int, int], None] = lambda hosts, slots: None,
    task_class: Any = None,
) -> Record | None:
    """Collective. Measure a job without compression; return what was found on rank 0, None on other ranks.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        seconds: how long to train, roughly.
        check: gets the numbers of hosts and of workers of one, and raises if they cannot be used.
        task_class: the task's class if the caller has it; found by its name otherwise.

    Raises:
        UsageError: If the job has what a plan does not predict.
        HvdtrainError: as training would raise it.
    """
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers, task_class)
        given = job.config
        check_predictable(given)
        plain = {"compression": "none", "sync_every": None, "profile": None}  # a recording takes time
        job = replace(job, config=given.model_copy(update=plain))
        with started(job, signals) as backend, signals.signals_take_precedence():
            check_workers(backend.workers.size)
            task_data, model, hosts = open_together(job, backend)
            check_hosts(hosts, backend.workers.allgather_object(backend.workers.local_size))
            check(len(set(hosts)), max(Counter(hosts).values()))
            check_task(given, task_data.task)
            bench_module(given.framework, "encoding").check_dense(backend)
            job = replace(job, config=with_learning_rate(job.config, model.own_rates))
            others = Others.of(given, task_data.task, backend.workers)
            return _measured(job, backend, (task_data, model, hosts), seconds, others)


def _measured(
    job: JobSpec,
    backend: Backend,
    opened: tuple[TaskData, ModelInfo, Sequence[str]],
    seconds: float,
    others: Others,
) -> Record | None:
    """Collective. Measure."""
    task_data, model, hosts = opened
    workers, config = backend.workers, job.config
    before = CpuTimes.now(workers.host)
    steps = measure_steps(job, backend, task_data, seconds=seconds, splits=True)
    on_gpu = not backend.info.description.endswith(" on the CPU")
    shapes = list(model.parameter_shapes.values())
    ways = [uncompressed(shapes, on_gpu=on_gpu)]
    most = min(max(sum(ways[0].sizes), _LEAST_BYTES), MOST_BYTES)
    messages, _ = measure_messages(
        workers, config.framework, on_gpu=on_gpu, most_bytes=most, seconds=_MESSAGE_SECONDS
    )
    curve = Curve([(one.size, one.horovod) for one in messages])
    ways += _other_ways(workers, config, (shapes, on_gpu), others, curve)
    ACTIVITY.enter("ending the measurement", is_long=True)
    times = workers.allgather_object(CpuTimes.now(workers.host).since(before))
    if workers.rank:
        return None
    per_host = Counter(hosts)
    blocks = [block.step_seconds for block in steps.alone]
    deviations = deviations_of(blocks)
    measured = Measured(
        workers=workers.size,
        hosts=len(per_host),
        slots=max(per_host.values()),
        controller=workers.controller,
        on_gpu=on_gpu,
        samples=TrainingPlan.of(config, workers.size, len(task_data.train_data)).batch.global_batch
        / workers.size,
        step=Spread.of(steps.blocks),
        data=steps.parts["data"],
        compute=steps.parts["compute"],
        lag=lag_of(blocks),
        deviations=deviations[:: -(-len(deviations) // _MOST_DEVIATIONS)],
        curve=curve,
        raw=messages[0].raw,
        ways=ways,
        accumulate=config.accumulate,
    )
    notes = [*job.notes, *model.notes, *task_data.notes, *steps.notes, *notes_on(config)]
    notes += notes_on_sizes(messages[-1].size, most)
    samples = len(task_data.train_data)
    return Record(
        config.task, backend.info.description, others.own, measured, samples, busy_hosts(times), notes
    )


def _other_ways(
    workers: Workers,
    config: Config,
    parameters: tuple[Sequence[tuple[int, ...]], bool],
    others: Others,
    curve: Curve,
) -> list[Way]:
    """Collective. Return the other ways, with what encoding takes while all workers of a host encode."""
    shapes, on_gpu = parameters
    encoding = bench_module(config.framework, "encoding")
    rounding = _seconds_of(workers, "fp16", encoding.half_of(shapes, on_gpu))
    summing = _seconds_of(workers, "fp16", encoding.half_sum_of(shapes, on_gpu))
    in_fp32 = curve.smallest().median + curve.volume_seconds(half(shapes).sizes[0]).median
    slower = Spread(*(max(0.0, getattr(summing, end) - in_fp32) for end in ENDS))
    ways = [half(shapes, on_gpu=on_gpu, encoding=rounding, summing=slower)]
    encode = encoding.low_rank_of(shapes, others.rank, on_gpu)
    ways.append(low_rank(shapes, others.rank, _seconds_of(workers, "PowerSGD", encode)))
    if others.every is not None:
        slots = slots_of(config.optimizer, config.momentum)
        ways.append(local_steps(shapes, others.every, slots))
    return ways


def _seconds_of(workers: Workers, name: str, encode: Callable[[], None]) -> Spread:
    """Collective. Return how long encoding takes on the slowest worker while all do it, with quartiles.

    After three turns it ends when its time is up.
    """
    ACTIVITY.enter(f"measuring the encoding of {name}", is_long=True)
    started_at = time.perf_counter()
    encode()
    encode()
    times: list[float] = []
    for _ in range(_ENCODE_REPEATS):
        spent = max(workers.allgather_object(time.perf_counter() - started_at))
        if spent > _ENCODE_SECONDS and len(times) >= _LEAST_REPEATS:
            break
        workers.barrier()
        begun = time.perf_counter()
        encode()
        times.append(time.perf_counter() - begun)
    found = workers.allgather_object(times)
    slowest = [max(of_turn) for of_turn in zip(*found, strict=True)]
    quarter = statistics.quantiles(slowest, n=4)
    return Spread(statistics.median(slowest), quarter[0], quarter[2])
