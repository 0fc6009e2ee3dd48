"""The measurement of one job, in the processes that a launcher started, or in one without a launcher."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.backends.base import Backend, ModelInfo
from hvdtrain.bench.before_launch import check_before_launch
from hvdtrain.bench.machine import CpuTimes, busy_hosts
from hvdtrain.config import Config, Layer
from hvdtrain.host.cores import threads_per_worker
from hvdtrain.jobs.learning_rate import with_learning_rate
from hvdtrain.jobs.opening.setup import JobSpec, TaskData, open_together, prepare, started
from hvdtrain.jobs.signals import interruptible
from hvdtrain.tools.bench.measure import check_rounds, measure_steps, skips_warmup
from hvdtrain.tools.bench.message_times import MOST_BYTES, MessageTime, measure_messages, words_for_size
from hvdtrain.tools.bench.result import Result
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seeded_frameworks

_LEAST_MESSAGE_SECONDS = 20.0
_LEFT_OUT = "evaluations, checkpoints, logs and callbacks are left out"


@dataclass(frozen=True)
class Request:
    """What is measured of a job.

    Attributes:
        seconds: how long to train, roughly.
        splits: whether to measure the parts of a step.
        messages: whether to measure sums by size.
        most_bytes: the largest size.
    """

    seconds: float = 20.0
    splits: bool = True
    messages: bool = True
    most_bytes: int = MOST_BYTES


def bench_job(layers: list[Layer], request: Request, task_class: Any = None) -> Result | None:
    """Collective. Measure a job, and return what was found on rank 0, None on other ranks.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        request: what is measured.
        task_class: the task's class if the caller has it; found by its name otherwise.

    Raises:
        HvdtrainError: as training would raise it.
    """
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers, task_class)
        check_rounds(job.config)  # before a framework is loaded
        check_before_launch(job.config, (), None)
        if job.config.profile is not None:  # a recorder slows Horovod down from its start
            notes = (*job.notes, "profile is left out: a recording takes time")
            job = replace(job, config=job.config.model_copy(update={"profile": None}), notes=notes)
        with started(job, signals) as backend, signals.signals_take_precedence():
            task_data, model, hosts = open_together(job, backend)
            job = replace(job, config=with_learning_rate(job.config, model.own_rates))
            return _measured(job, backend, task_data, model, hosts, request=request)


def _measured(
    job: JobSpec,
    backend: Backend,
    task_data: TaskData,
    model: ModelInfo,
    hosts: Sequence[str],
    *,
    request: Request,
) -> Result | None:
    """Collective. Measure."""
    workers = backend.workers
    before = CpuTimes.now(workers.host)
    steps = measure_steps(job, backend, task_data, seconds=request.seconds, splits=request.splits)
    messages: list[MessageTime] = []
    beside, beyond = "", tuple[str, ...]()
    if request.messages and workers.size > 1:
        messages, beside = measure_messages(
            workers,
            job.config.framework,
            on_gpu=not backend.info.description.endswith(" on the CPU"),
            most_bytes=request.most_bytes,
            seconds=max(request.seconds, _LEAST_MESSAGE_SECONDS),
        )
        if messages[-1].size < request.most_bytes:
            left_out = words_for_size(messages[-1].size)
            beyond = (f"all-reduces of more than {left_out} were left out: their time was up",)
    ACTIVITY.enter("ending the measurement", is_long=True)
    times = workers.allgather_object(CpuTimes.now(workers.host).since(before))
    if workers.rank:
        return None
    notes = (
        *job.notes,
        *model.notes,
        *task_data.notes,
        *steps.notes,
        *notes_on(job.config),
        *beyond,
        _LEFT_OUT,
    )
    return Result(
        task=job.config.task,
        device=backend.info.description,
        workers=workers.size,
        hosts=len(set(hosts)),
        controller=workers.controller,
        global_batch=TrainingPlan.of(job.config, workers.size, len(task_data.train_data)).batch.global_batch,
        reduction=model.reduction,
        steps=steps,
        messages=messages,
        beside=beside,
        warnings=busy_hosts(times),
        notes=notes,
        threads=job.config.threads or threads_per_worker(workers.local_size),
    )


def notes_on(config: Config) -> list[str]:
    """Return what of a config is not measured as the job has it."""
    notes = []
    if config.resume:
        notes.append("the measurement starts from the initial weights, not from --resume")
    if skips_warmup(config):
        notes.append(
            f"compression {config.compression} is measured as it is after the warm-up, in which gradients "
            "travel uncompressed"
        )
    if config.lr_schedule == "plateau":
        notes.append("lr_schedule plateau needs evaluations: the learning rate is constant here")
    return notes
