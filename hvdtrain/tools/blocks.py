"""A job as a tool trains it: opened by all its workers, in blocks of steps, leaving nothing behind."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hvdtrain.backends.records import ModelInfo
from hvdtrain.backends.reduction.low_rank import has_warmup
from hvdtrain.backends.step_metrics import NO_FLAGS, ControlFlags, StepMetrics
from hvdtrain.config import Config, Layer
from hvdtrain.config.values import rank_of
from hvdtrain.data.readers import Readers
from hvdtrain.data.training_data import readers_for
from hvdtrain.jobs.entering import new_session, seed_training
from hvdtrain.jobs.failures import interruptible
from hvdtrain.jobs.opening.dry_run import dry_run
from hvdtrain.jobs.opening.setup import TrainingRun, opened
from hvdtrain.jobs.opening.start import check_may_be_elastic, prepare, started
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.loop import run as run_loop
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.report import Report
from hvdtrain.session import Session
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seeded_frameworks

_WARM_STEPS = 3  # at the start of a block: the data are not read ahead yet
_LEAST_STEPS, MOST_STEPS = 10, 1000  # of a block
_LONG_SECONDS, _LEAST_LONG_STEPS = 1.0, 3  # where steps are so long, a block may have fewer
_ENDLESS = 10**9
SMALL_RATE = 1e-3  # of the learning rate, where a model must not diverge
# a worker's step times, and how long all waited for data in a step on average
Own = tuple[list[float], float]
Change = Callable[[Config], Config]


@dataclass(frozen=True)
class OpenRun:
    """A run from the initial weights; ``config`` is that of the job, with the learning rate that counts."""

    config: Config
    session: Session
    model: ModelInfo
    notes: tuple[str, ...]


@contextmanager
def opened_run(layers: list[Layer], change: Change, task_class: Any = None) -> Iterator[OpenRun]:
    """Collective. Return a context with a run of a job."""
    check_may_be_elastic(None)
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers, task_class)
        if job.config.profile is not None:  # a recorder slows Horovod down from its start
            job = replace(job, config=job.config.model_copy(update={"profile": None}))
        with started(job, signals) as backend, signals.signals_take_precedence():
            run = opened(job, backend)
            with tried_session(run.with_config(change(run.config))) as (session, _, notes):
                yield OpenRun(run.config, session, run.model, (*run.notes(), *notes))


@contextmanager
def tried_session(run: TrainingRun) -> Iterator[tuple[Session, Readers, Sequence[str]]]:
    """Collective. Return a context with a run from initial weights, its readers and the dry run's notes."""
    run = replace(run, task_data=replace(run.task_data, eval_data=None))
    restore(run)
    seed_training(run, 0)
    with readers_for(run.config, run.task_data.train_data, None) as readers:
        session = new_session(run, ResumePoint(), readers)
        ACTIVITY.enter("in the dry run", is_long=True)
        yield session, readers, dry_run(session, run.task_data.task).notes


class Recorder(Report):
    """A report that keeps what the metrics of steps say."""

    def __init__(self) -> None:
        super().__init__()
        self.first_loss: float | None = None
        self.wait_seconds: list[float] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep a note."""
        self.notes.append(text)

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Keep what a step's metrics say; local steps share what is known of all of them together."""
        if self.first_loss is None:
            self.first_loss = metrics.mean("loss")
        self.wait_seconds += step.steps * [metrics.statistics.data_wait_seconds / step.steps]


def run_block(session: Session, recorder: Recorder, steps: int) -> Own:
    """Collective unless the session has one worker. Train some steps and return how long each of them took.

    A step lasts from the moment when its batch is there to the one when the next step's batch is. Local steps
    are timed together, up to the next one after a synchronisation: each of these times is their mean.
    """
    every = session.plan().sync_every
    warm, steps = whole_rounds(_WARM_STEPS, every), whole_rounds(steps, every)
    stamps: list[float] = []

    def poll_signals() -> ControlFlags:
        stamps.append(time.perf_counter())
        return ControlFlags(stop=len(stamps) > warm + steps)

    recorder.wait_seconds.clear()
    session.wanted = session.unsent = NO_FLAGS
    run_loop(session, poll_signals)
    timed = stamps[warm : warm + steps + 1]
    if len(timed) <= steps:
        raise RuntimeError(f"a block of {steps} steps ended after {len(stamps)}")
    waits = recorder.wait_seconds[warm + 1 : warm + steps + 1]
    seconds = [(after - before) / every for before, after in pairwise(timed[::every])]
    return seconds, sum(waits) / session.backend.workers.size / steps


def whole_rounds(steps: int, every: int) -> int:
    """Return the least number of steps that ends with a synchronisation, and is not less than given."""
    return -(-steps // every) * every


def bench_config(config: Config) -> Config:
    """Return the config of a job that trains without an end and leaves nothing behind."""
    changes: dict[str, Any] = {
        "epochs": None, "steps": _ENDLESS, "resume": None, "run_dir": None, "save_every": None,
        "keep_best": None, "early_stopping": None, "trace_indices": False, "check_replicas_every": _ENDLESS,
        "profile": None,
    }  # fmt: skip
    if config.lr_schedule == "plateau":  # which needs evaluations
        changes["lr_schedule"] = "constant"
    if skips_warmup(config):
        rate = SMALL_RATE * config.base_learning_rate
        changes |= {"warmup_epochs": 0.0, "warmup_steps": None, "learning_rate": rate}
    return config.model_copy(update=changes)


def skips_warmup(config: Config) -> bool:
    """Return whether a job is measured without its warm-up, since gradients are only compressed after it."""
    return rank_of(config.compression) is not None and has_warmup(config)


def steps_of_block(seconds: float, step_seconds: float) -> int:
    """Return how many steps a block has that should last so many seconds."""
    least = _LEAST_STEPS if step_seconds < _LONG_SECONDS else _LEAST_LONG_STEPS
    return min(max(round(seconds / max(step_seconds, 1e-6)), least), MOST_STEPS)
