"""One job that is measured, in the processes that a launcher started, or in one without a launcher."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from hvdtrain.backends.base import Backend
from hvdtrain.config import Config, Layer
from hvdtrain.data.readers import Readers
from hvdtrain.errors import UsageError
from hvdtrain.horovod_build.installed import BUILD_COMMAND, installed_build
from hvdtrain.host.cores import threads_per_worker
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.entering import new_session
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.setup import TrainingRun, build, opened
from hvdtrain.jobs.opening.start import prepare, started
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.session import Session
from hvdtrain.storage.text import counted
from hvdtrain.tools.blocks import (
    MOST_STEPS,
    SMALL_RATE,
    Recorder,
    bench_config,
    run_block,
    skips_warmup,
    steps_of_block,
    tried_session,
    whole_rounds,
)
from hvdtrain.tools.message_times import (
    MIB,
    MOST_BYTES,
    Way,
    bench_module,
    measure_messages,
    way_of,
    words_for_size,
)
from hvdtrain.tools.spread import PARTS, Block, Spread, split_of
from hvdtrain.training_plan import TrainingPlan, batch_plan
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.seeding import seeded_frameworks
from hvdtrain.workers.wire_types import travels

VERSION = 2  # of the documents
_FIRST_STEPS = 5  # which show how many fit into the time
_BLOCKS = 5  # with the other workers, and as many without
_PARTS = {
    "data": "waiting for data",
    "compute": "computing",
    "slowest": "waiting for the slowest worker",
    "communication": "exposed communication",
}
_OTHERS = 0.1  # of a core, and
_OTHERS_SHARE = 0.02  # of all cores: what other processes may use
_STEAL_SHARE = 0.02
_LEAST_MESSAGE_SECONDS = 20.0


@dataclass(frozen=True)
class Request:
    """What is measured of a job."""

    seconds: float = 20.0  # how long to train, roughly
    splits: bool = True  # whether to measure the parts of a step
    most_bytes: int | None = MOST_BYTES  # the largest sum; None for none
    plan: bool = False  # whether ``plan`` predicts from it, which needs the job's messages


def bench_job(
    layers: list[Layer],
    request: Request,
    check_hosts: Callable[[Sequence[str], Sequence[int]], None] = lambda hosts, local_sizes: None,
) -> dict[str, Any] | None:
    """Collective. Measure a job, and return the document of what was found on rank 0, None on other ranks."""
    command = "plan" if request.plan else "bench"
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers, None)
        check_rounds(job.config)  # before a framework is loaded
        check_before_launch(job.config, (), None, command=command)
        if job.config.profile is not None:  # a recorder slows Horovod down from its start
            notes = (*job.notes, "profile is left out: a recording takes time")
            job = replace(job, config=job.config.model_copy(update={"profile": None}), notes=notes)
        with started(job, signals) as backend, signals.signals_take_precedence():
            run = opened(job, backend)
            check(Job(job.config, run.task_data.task, command=command))
            check_hosts(run.hosts, backend.workers.allgather_object(backend.workers.local_size))
            return _measured(run, request)


def _measured(run: TrainingRun, request: Request) -> dict[str, Any] | None:
    """Collective. Measure."""
    backend, config, model = run.backend, run.config, run.model
    workers, device = backend.workers, backend.info.description
    on_gpu = not device.endswith(" on the CPU")
    way: Way | None = None
    most = request.most_bytes
    if request.plan:
        bench_module(config.framework).check_dense(backend)
        way = way_of(config, list(model.parameter_shapes.values()), on_gpu=on_gpu)
        most = min(max(*way.sizes, MIB), MOST_BYTES)
    before = CpuTimes.now(workers.host)
    steps = measure_steps(run, seconds=request.seconds, splits=request.splits)
    notes = [*run.notes(), *steps["notes"], *notes_on(config)]
    sums = []
    if most is not None and workers.size > 1:
        limit = max(request.seconds, _LEAST_MESSAGE_SECONDS)
        sums = measure_messages(workers, config.framework, on_gpu=on_gpu, most_bytes=most, seconds=limit)
        if sums[-1][0] < most:
            largest = words_for_size(sums[-1][0])
            notes.append(f"all-reduces of more than {largest} were left out: their time was up")
    ACTIVITY.enter("ending the measurement", is_long=True)
    times = workers.allgather_object(CpuTimes.now(workers.host).since(before))
    if workers.rank:
        return None
    return {
        "version": VERSION,
        "task": config.task,
        "device": device,
        "workers": workers.size,
        "hosts": len(set(run.hosts)),
        "slots": max(map(run.hosts.count, run.hosts)),
        "controller": workers.controller,
        "global_batch": TrainingPlan.of(
            config, workers.size, len(run.task_data.train_data)
        ).batch.global_batch,
        "threads": config.threads or threads_per_worker(workers.local_size),
        "reduction": model.reduction,
        **steps,
        "all_reduce": [{"bytes": size, "horovod_seconds": one.to_dict()} for size, one in sums],
        "exchange": None if way is None else asdict(way),
        "warnings": [*busy_hosts(times), *doubtful_parts(steps)],
        "notes": [*notes, "evaluations, checkpoints, logs and callbacks are left out"],
    }


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
    """Collective. Time blocks of the job, and of each worker on its own; return fields of the document."""
    run, workers = run.with_config(bench_config(run.config)), run.backend.workers
    with tried_session(run) as (session, readers, notes):
        sessions, plan = [session], session.plan()
        if splits and workers.size > 1:
            ACTIVITY.enter("building a second model", is_long=True)
            sessions.append(session_alone(run, plan, readers))
        recorders = [Recorder() for _ in sessions]
        for one, recorder in zip(sessions, recorders, strict=True):
            one.services.report = recorder

        def block(place: int, steps: int) -> Block:
            of_ranks = workers.allgather_object(run_block(sessions[place], recorders[place], steps))
            return Block([own for own, _ in of_ranks], statistics.fmean(waited for _, waited in of_ranks))

        places = range(len(sessions))
        first = [block(place, _FIRST_STEPS) for place in places]
        longest = max(statistics.median(own) for one in first for own in one.step_seconds)
        steps = steps_of_block(seconds / (_BLOCKS * len(sessions)), longest)
        steps = whole_rounds(steps, plan.sync_every)
        rounds = [[block(place, steps) for place in places] for _ in range(_BLOCKS)]
    parts = [split_of(blocks[0], blocks[1] if len(blocks) > 1 else None) for blocks in rounds]
    means, has_parts = [blocks[0].mean_seconds for blocks in rounds], len(sessions) > 1 or workers.size == 1
    spreads = {
        "step_seconds": [statistics.median(blocks[0].step_seconds[0]) for blocks in rounds],
        "mean_step_seconds": means,
        "samples_per_second": [plan.batch.global_batch / mean for mean in means],
    }
    return {
        "steps_timed": _BLOCKS * steps,
        "first_loss": recorders[0].first_loss or 0.0,
        **{name: Spread.of(values).to_dict() for name, values in spreads.items()},
        "part_seconds": {
            name: Spread.of([part[name] for part in parts]).to_dict() for name in PARTS if has_parts
        },
        "notes": [*notes, *recorders[0].notes],
    }


def describe_job(document: Mapping[str, Any]) -> str:
    """Return the text that rank 0 shows of a job's document."""
    workers = document["workers"]
    over = f" over {document['controller']}" if workers > 1 else ""
    step = Spread(**document["step_seconds"])
    mean = Spread(**document["mean_step_seconds"])
    rows = [
        ("speed", f"{Spread(**document['samples_per_second']).describe(0)} samples/s"),
        ("step", f"{_in_ms(step)}, {document['steps_timed']:,} steps timed"),
    ]
    parts = {name: Spread(**part) for name, part in document["part_seconds"].items()}
    rows += [("mean step", f"{_in_ms(mean)}, of which")] if parts else []
    for name, part in parts.items():
        is_nothing, share = part.low == part.high == 0, part.median / mean.median
        noise = "; not above the noise" if part.low <= 0 and not is_nothing else ""
        doubt = "" if _can_be(share) else "; not trustworthy"
        if workers > 1 or not is_nothing:  # one worker waits for nobody
            rows.append((f"  {_PARTS[name]}", f"{_in_ms(part)}, {share:.0%} of it{noise}{doubt}"))
    if document["threads"]:
        rows.append(("threads", f"{document['threads']} for each worker's computation"))
    if workers > 1:
        rows.append(("gradients", document["reduction"]))
    width = max(len(name) for name, _ in rows)
    sums = document["all_reduce"]
    return "\n".join([
        f"bench: {document['task']} with {document['device']}, {counted(workers, 'worker')}{over}, "
        f"{document['global_batch']:,} samples a step",
        *(f"  {name:<{width}}  {text}" for name, text in rows),
        *(["  all-reduce"] if sums else []),
        *(
            f"    {words_for_size(size):>8}  {seconds * 1e6:>10,.0f} us  {size / seconds / 1e6:>7,.0f} MB/s"
            for size, seconds in ((one["bytes"], one["horovod_seconds"]["median"]) for one in sums)
        ),
        *notes_and_warnings([document]),
    ])  # fmt: skip


def notes_and_warnings(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of what documents note, each once, and then of their warnings."""
    lines = [
        f"  {kind}: {text}"
        for kind in ("note", "warning")
        for document in documents
        for text in document.get(f"{kind}s", ())
    ]
    return list(dict.fromkeys(lines))


def doubtful_parts(document: Mapping[str, Any]) -> list[str]:
    """Return a warning if a part of a mean step is more than all of it or less than nothing."""
    mean, parts = document["mean_step_seconds"]["median"], document["part_seconds"]
    wrong = [_PARTS[name] for name, part in parts.items() if not _can_be(part["median"] / mean)]
    if not wrong:
        return []
    return [
        f"{' and '.join(wrong)} cannot be more than all of a step or less than nothing: steps with the "
        "other workers and without them were not disturbed alike, so the parts are not trustworthy; "
        "measure again on an idle machine, or with more --seconds"
    ]


def _can_be(share: float) -> bool:
    """Return whether a part can have this share of a step, as it is shown in whole percents."""
    return 0 <= round(100 * share) <= 100


def _in_ms(seconds: Spread) -> str:
    return f"{seconds.times(1e3).describe()} ms"


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


def check_before_launch(
    config: Config, counts: Iterable[int], controller: str | None, command: str = "bench"
) -> None:
    """Check what each of the jobs would be refused for, before any of them is started."""
    check(Job(config, command=command))
    check(Job(config, command="bench"))
    build = installed_build()
    if build is not None and controller is not None:
        title, has = {"mpi": ("MPI", build.mpi is not None), "gloo": ("Gloo", build.gloo)}[controller]
        if not has:
            raise UsageError(
                f"--controller {controller}: Horovod was built without {title}",
                f"Leave --controller out, or build Horovod with {title} ({BUILD_COMMAND}).",
            )
    for count in counts:
        batch_plan(config, count, None)


@travels
@dataclass(frozen=True)
class CpuTimes:
    """What the clocks of a worker and its host say."""

    host: str  # the host's name
    cores: int  # the host's cores
    seconds: float  # wall-clock time
    busy: float  # CPU seconds of the whole host
    stolen: float  # CPU seconds that the machine below it gave to others
    own: float  # CPU seconds of this worker and of its processes, those that have ended included

    @classmethod
    def now(cls, host: str) -> "CpuTimes":
        """Return what they say now."""
        times = psutil.cpu_times()
        busy = sum(getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq"))
        own, stolen = psutil.Process(), getattr(times, "steal", 0.0)
        used = 0.0
        for process in (own, *own.children(recursive=True)):
            try:
                used += sum(process.cpu_times()[:4])  # a child that has ended counts in its parent
            except psutil.Error:
                continue
        return cls(host, psutil.cpu_count() or 1, time.perf_counter(), busy, stolen, used)

    def since(self, before: "CpuTimes") -> "CpuTimes":
        """Return the differences to an earlier time."""
        names = ("seconds", "busy", "stolen", "own")
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in names})


def busy_hosts(of_ranks: Sequence[CpuTimes]) -> list[str]:
    """Return a warning for each host that was busy with something else than the job's workers."""
    warnings = []
    for host in dict.fromkeys(one.host for one in of_ranks):
        workers = [one for one in of_ranks if one.host == host]
        seconds, cores = max(workers[0].seconds, 1e-9), workers[0].cores
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
