"""The measurement of one job, in the processes that a launcher started, or in one without a launcher."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from hvdtrain.backends.base import Backend, ModelInfo
from hvdtrain.config import Config, Layer
from hvdtrain.errors import UsageError
from hvdtrain.horovod_build.installed import BUILD_COMMAND, installed_build
from hvdtrain.host.cores import threads_per_worker
from hvdtrain.jobs.compatibility import check
from hvdtrain.jobs.features import Job
from hvdtrain.jobs.opening.limits import with_learning_rate
from hvdtrain.jobs.opening.setup import JobSpec, TaskData, open_together, prepare, started
from hvdtrain.jobs.signals import interruptible
from hvdtrain.tools.bench.measure import check_rounds, measure_steps, skips_warmup
from hvdtrain.tools.bench.message_times import (
    MOST_BYTES,
    MessageTime,
    measure_messages,
    sizes_up_to,
    words_for_size,
)
from hvdtrain.tools.bench.result import Result
from hvdtrain.training_plan import TrainingPlan, batch_plan
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seeded_frameworks
from hvdtrain.workers.wire_types import travels

_OTHERS = 0.1  # of a core, beside 2 % of all cores
_OTHERS_SHARE = 0.02
_STEAL_SHARE = 0.02


@travels
@dataclass(frozen=True)
class CpuTimes:
    """What the clocks of a worker and its host say.

    Attributes:
        host: the host's name.
        cores: the host's cores.
        seconds: wall-clock time.
        busy: CPU seconds of the whole host.
        stolen: CPU seconds that the machine below it gave to others.
        own: CPU seconds of this worker and of its processes, those that have ended included.
    """

    host: str
    cores: int
    seconds: float
    busy: float
    stolen: float
    own: float

    @classmethod
    def now(cls, host: str) -> "CpuTimes":
        """Return what they say now."""
        times = psutil.cpu_times()
        busy = sum(getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq"))
        return cls(
            host,
            psutil.cpu_count() or 1,
            time.perf_counter(),
            busy,
            getattr(times, "steal", 0.0),
            _own_seconds(),
        )

    def since(self, before: "CpuTimes") -> "CpuTimes":
        """Return the differences to an earlier time."""
        return CpuTimes(
            self.host,
            self.cores,
            self.seconds - before.seconds,
            self.busy - before.busy,
            self.stolen - before.stolen,
            self.own - before.own,
        )


def _own_seconds() -> float:
    """Return the CPU seconds of this process and those below it; one that has ended counts in its parent."""
    total = 0.0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def busy_hosts(of_ranks: Sequence[CpuTimes]) -> list[str]:
    """Return a warning for each host that was busy with something else than the job's workers.

    Args:
        of_ranks: what each worker measured over the same time.
    """
    warnings = []
    for host in dict.fromkeys(one.host for one in of_ranks):
        workers = [one for one in of_ranks if one.host == host]
        seconds = max(workers[0].seconds, 1e-9)
        cores = workers[0].cores
        others = (workers[0].busy - sum(one.own for one in workers)) / seconds
        stolen = workers[0].stolen / seconds
        if others > _OTHERS + _OTHERS_SHARE * cores:
            warnings.append(
                f"{host} was busy: other processes used {others:.1f} of its {cores} cores, so these figures "
                "are worse than on an idle machine"
            )
        if stolen > _STEAL_SHARE * cores:
            warnings.append(
                f"{host} is a virtual machine that did not get {stolen:.1f} of its {cores} cores "
                "(CPU steal), so these figures vary with what its neighbours do"
            )
    return warnings


_TITLES = {"mpi": "MPI", "gloo": "Gloo"}


def check_before_launch(config: Config, counts: Iterable[int], controller: str | None) -> None:
    """Check what each of the jobs would be refused for, before any of them is started.

    Args:
        config: the jobs' config.
        counts: their numbers of workers.
        controller: the user's choice; None for horovodrun's.

    Raises:
        UsageError: If Horovod was built without the controller.
        ConfigError: If a worker would have no samples.
    """
    check(Job(config, command="bench"))
    build = installed_build()
    if build is not None and controller is not None:
        has = {"mpi": build.mpi is not None, "gloo": build.gloo}[controller]
        if not has:
            title = _TITLES[controller]
            raise UsageError(
                f"--controller {controller}: Horovod was built without {title}",
                f"Leave --controller out, or build Horovod with {title} ({BUILD_COMMAND}).",
            )
    for count in counts:
        batch_plan(config, count, None)


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
    beyond = tuple[str, ...]()
    if request.messages and workers.size > 1:
        messages = measure_messages(
            workers,
            job.config.framework,
            on_gpu=not backend.info.description.endswith(" on the CPU"),
            sizes=sizes_up_to(request.most_bytes),
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
