"""A job as far as a search needs it: opened by all its workers, trained for some steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.backends.base import ModelInfo
from hvdtrain.config import Config, Layer
from hvdtrain.jobs.opening.dry_run import dry_run
from hvdtrain.jobs.opening.limits import with_learning_rate
from hvdtrain.jobs.opening.setup import check_may_be_elastic, open_together, prepare, started
from hvdtrain.jobs.resume import ResumePoint, restore
from hvdtrain.jobs.signals import interruptible
from hvdtrain.jobs.training_run import new_session
from hvdtrain.session import Session, readers_for
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.seeding import seed_host_generators, seeded_frameworks


@dataclass(frozen=True)
class SearchRun:
    """A run from the initial weights; ``config`` is that of the job, with the learning rate that counts."""

    config: Config
    session: Session
    model: ModelInfo
    notes: tuple[str, ...]


@contextmanager
def opened_run(
    layers: list[Layer], change: Callable[[Config], Config], task_class: Any = None
) -> Iterator[SearchRun]:
    """Collective. Return a context with a run of a job.

    Args:
        layers: config values, weakest source first, without the task's defaults.
        change: returns the config of the run, given that of the job.
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
            task_data = replace(task_data, eval_data=None)
            own = with_learning_rate(job.config, model.own_rates)
            config = change(own)
            restore(config, backend, len(task_data.train_data))
            seed_host_generators(config.seed, f"step 0, rank {backend.workers.rank}")
            with readers_for(config, task_data.train_data, None) as readers:
                session = new_session(config, backend, task_data, ResumePoint(), readers)
                ACTIVITY.enter("in the dry run", is_long=True)
                notes = dry_run(session, task_data.task).notes
                yield SearchRun(own, session, model, (*job.notes, *model.notes, *task_data.notes, *notes))
