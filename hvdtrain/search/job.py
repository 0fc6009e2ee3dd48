"""A job as far as a search needs it: opened by all its workers, trained for some steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.activity import ACTIVITY
from hvdtrain.backends.base import Backend, ModelInfo
from hvdtrain.config import Config, Layer
from hvdtrain.errors import ConfigError
from hvdtrain.jobs.dry_run import dry_run
from hvdtrain.jobs.learning_rate import with_learning_rate
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.setup import TaskData, check_may_be_elastic, open_together, prepare, started
from hvdtrain.jobs.signals import interruptible
from hvdtrain.jobs.training_run import new_session
from hvdtrain.seeding import seed_host_generators, seeded_frameworks
from hvdtrain.session import Session, readers_for


@dataclass(frozen=True)
class OpenJob:
    """A job with its data open and its model built.

    Attributes:
        config: the resolved config of the user, with the learning rate that counts.
        backend: the framework.
        task_data: the task with its data; those of evaluation are left out.
        model: what is known of the model.
        notes: what to tell the user.
    """

    config: Config
    backend: Backend
    task_data: TaskData
    model: ModelInfo
    notes: tuple[str, ...]


@contextmanager
def opened_job(layers: list[Layer], task_class: Any = None) -> Iterator[OpenJob]:
    """Collective. Return a context with a job.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        task_class: the task's class if the caller has it; found by its name otherwise.

    Raises:
        HvdtrainError: as training would raise it.
    """
    check_may_be_elastic(None)
    with interruptible() as signals, seeded_frameworks():
        job = prepare(layers, task_class)
        if job.config.profile is not None:  # a recorder slows Horovod down from its start
            job = replace(job, config=job.config.model_copy(update={"profile": None}))
        with started(job, signals) as backend, signals.signals_take_precedence():
            task_data, model, _ = open_together(job, backend)
            config = with_learning_rate(job.config, model.own_rates)
            notes = (*job.notes, *model.notes, *task_data.notes)
            yield OpenJob(config, backend, replace(task_data, eval_data=None), model, notes)


@contextmanager
def session_of(job: OpenJob, config: Config) -> Iterator[tuple[Session, tuple[str, ...]]]:
    """Collective. Return a context with a run from the initial weights.

    Args:
        job: the job.
        config: its config with what differs; ``bench_config`` leaves out what would be written.

    Returns:
        The run, and the notes of the dry run.
    """
    restore(config, job.backend, len(job.task_data.train_data))
    seed_host_generators(config.seed, f"step 0, rank {job.backend.workers.rank}")
    with readers_for(config, job.task_data.train_data, None) as readers:
        session = new_session(config, job.backend, job.task_data, ResumePoint(), readers)
        ACTIVITY.enter("in the dry run", is_long=True)
        yield session, tuple(dry_run(session, job.task_data.task).notes)


def check_synchronous(config: Config, command: str) -> None:
    """Check that the workers average their gradients in every step.

    Raises:
        ConfigError: If the job has local steps.
    """
    if config.sync_every is not None:
        raise ConfigError(
            f"sync_every {config.sync_every}: {command} compares single steps of all workers, and local "
            "steps are each worker's own",
            f"Leave sync_every out, and start {command} with one worker, whose steps local steps are.",
            everywhere=True,
        )
