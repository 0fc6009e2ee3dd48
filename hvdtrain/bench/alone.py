"""A worker of a job as if it were alone: the same model and batches, and no collective in its steps."""

from dataclasses import replace
from importlib import import_module
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.reduction.local_steps import LoneWorker
from hvdtrain.config import Config
from hvdtrain.data.readers import Readers
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.opening.setup import TaskData, build
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.jobs.training_run import new_session
from hvdtrain.session import Session
from hvdtrain.training_plan import TrainingPlan

_RATE_FACTOR = 1e-3


def bench_module(framework: str, name: str) -> Any:
    """Import a module of a framework's own part of this package.

    Args:
        framework: "torch" or "tf".
        name: the module's file name, which is the same for all frameworks.
    """
    folder = FRAMEWORKS[framework].module.split(".")[-2]
    return import_module(f"hvdtrain.bench.{folder}.{name}")


def session_alone(
    config: Config, backend: Backend, task_data: TaskData, plan: TrainingPlan, readers: Readers
) -> Session:
    """Return a run of this worker on its own, with batches of the size that it has in the job. Local.

    It has a model of its own, and reads other samples than the other workers do.

    Args:
        config: the job's config.
        backend: the job's backend.
        task_data: the task with its data.
        plan: the job's plan.
        readers: the processes that read samples.
    """
    config = config.model_copy(
        update={
            "global_batch_size": None,
            "batch_size": plan.batch.micro_batch,
            "seed": config.seed + backend.workers.rank,
            # the rate of the job is meant for its global batch, and could let this training diverge
            "learning_rate": _RATE_FACTOR * config.base_learning_rate,
        }
    )
    workers = backend.workers
    lone = LoneWorker(workers.host, local_rank=workers.local_rank, local_size=workers.local_size)
    alone: Backend = bench_module(config.framework, "alone").backend_alone(config, backend, lone)
    build(config, task_data.task, alone)
    return new_session(config, alone, replace(task_data, eval_data=None), ResumePoint(), readers)
