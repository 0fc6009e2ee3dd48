"""What a job may have of options, data, workers and commands: the features of jobs/compatibility.py."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.backends.optimizers import own_optimizer_method
from hvdtrain.config import Config
from hvdtrain.config.values import compression_of, rank_of
from hvdtrain.data.eval_sets import TRAINING_DATA
from hvdtrain.data.stream import Stream
from hvdtrain.elastic.driver.cluster import MOST_WORKERS
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.storage.urls import is_url
from hvdtrain.workers.agreement import Workers

# settings of Horovod that keep what they learned, or their groups of workers, for the life of a process
FIXED_SETTINGS = (
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_TORUS_ALLREDUCE",
    "HOROVOD_AUTOTUNE",
)


@dataclass(frozen=True)
class Job:
    """What is known of a job when it is checked."""

    config: Config  # the resolved config
    task: Any = None  # the task; None before it is made
    workers: Workers | None = None  # the workers; None before they have started
    uses_nccl: bool = False  # whether Horovod reduces gradients by NCCL
    # those of the data that have no index, by their names in messages
    streams: Mapping[str, Stream] = field(default_factory=dict)
    has_eval_data: bool = True  # whether the task has evaluation data
    command: str = ""  # what is done; empty for training
    elastic: bool = False  # whether the launcher started an elastic job, before the workers have started

    def own(self, kind: str) -> str:
        """Return the task's method in place of a "step" or a "loss"; empty if it has none."""
        method: str = getattr(FRAMEWORKS[self.config.framework], f"{kind}_method")
        return method if getattr(self.task, method, None) is not None else ""

    @property
    def own_optimizer(self) -> str:
        """The task's method that makes its optimizers; empty if it has none."""
        return own_optimizer_method(self.task, self.config)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.elastic or (self.workers is not None and self.workers.is_elastic)

    @property
    def most(self) -> int:
        """The most workers that the job may have."""
        return self.workers.most if self.workers is not None else 1

    def describe(self, text: str) -> str:
        """Return a text filled in with the job's values."""
        values: dict[str, object] = {name: _shown(value) for name, value in self.config}
        values |= {name: os.environ.get(name, "") for name in FIXED_SETTINGS}
        values |= {
            "own_step": self.own("step"),
            "own_loss": self.own("loss"),
            "own_optimizer": self.own_optimizer,
        }
        values |= {"stream": next(iter(self.streams), ""), "command": self.command}
        values |= {"host": self.workers.host if self.workers is not None else "", "most": self.most}
        return text.format_map(values)


@dataclass(frozen=True)
class Feature:
    """Something that a job may have, or lack."""

    name: str  # its name in the documentation
    holds: Callable[[Job], bool]  # whether a job has it
    text: str = ""  # its name in messages if it is another one, filled in with the job's values
    joined: str = "with"  # the word before it as the second of a row

    def describe(self, job: Job) -> str:
        """Return its name in messages."""
        return job.describe(self.text) if self.text else self.name.replace("`", "")


def option(field: str, *values: object) -> Feature:
    """Return that a field has one of some values, or any other value than its default."""
    default = Config.model_fields[field].default
    name = f"`{field}` {' or '.join(map(str, values))}".strip()
    text = field if default is False or default == () else f"{field} {{{field}}}"

    def holds(job: Job) -> bool:
        value = getattr(job.config, field)
        return value in values if values else value != default

    return Feature(name, holds, text)


def _of_config(name: str, field: str, holds: Callable[[Config], bool]) -> Feature:
    """Return that a config meets a condition.

    Args:
        name: its name in the documentation.
        field: the field that messages name with its value.
        holds: whether a config meets it.
    """
    return Feature(name, lambda job: holds(job.config), f"{field} {{{field}}}")


def no_option(field: str) -> Feature:
    """Return that a field has its default."""
    given = option(field).holds
    return Feature(f"`{field}`", lambda job: not given(job), joined="without")


def commands(*names: str) -> Feature:
    """Return that one of some commands is given."""
    title = " or ".join(f"`{name}`" for name in names)
    return Feature(title, lambda job: job.command in names, "{command}", "by")


def setting(name: str) -> Feature:
    """Return that a setting of Horovod is on."""

    def holds(_: Job) -> bool:
        return os.environ.get(name, "").strip().lower() not in ("", "0", "false")

    return Feature(f"`{name}`", holds, f"{name}={{{name}}}")


# fmt: off
SHARD, STAGES, SYNC_EVERY, SYNC_NORM = map(option, ("shard", "stages", "sync_every", "sync_batch_norm"))
COMPRESSED, PLAN = option("compression"), commands("plan")
OVERLAP = option("overlap")
POWERSGD = _of_config("`compression` powersgd", "compression", lambda c: rank_of(c.compression) is not None)
WHOLE = _of_config("`compression` powersgd", "compression",
                   lambda c: not compression_of(c.compression).parts_as)
WARMUP_EPOCHS = _of_config("`warmup_epochs`", "warmup_epochs",
                           lambda c: c.warmup_steps is None and c.warmup_epochs > 0)
WARMUP_STEPS = _of_config("`warmup_steps`", "warmup_steps", lambda c: bool(c.warmup_steps))
LATE_PROFILE = _of_config("`profile` of later steps", "profile",
                          lambda c: bool(c.profile and c.steps and c.profile.first > c.steps))
EPOCHS = Feature("`epochs`", lambda job: job.config.steps is None)
EVALUATED_AT_END = Feature("`eval_every` null", lambda job: job.config.eval_every is None)
NO_EVAL_DATA = Feature("evaluation data", lambda job: not job.has_eval_data, joined="without")
RUN_DIR_URL = Feature("a URL as `run_dir`", lambda job: is_url(job.config.run_dir or ""))
XLA = Feature("`compile` in TensorFlow",
              lambda job: job.config.compile and job.config.framework == "tf", "compile")
PLANNED_STEPS = Feature("`sync_every` in a `plan`",
                        lambda job: job.command == "plan" and job.config.sync_every is not None,
                        "sync_every {sync_every} in a plan")
ELASTIC = Feature("an elastic job", lambda job: job.is_elastic, joined="in")
ELASTIC_BATCH = Feature("`global_batch_size` in an elastic job",
                        lambda job: job.is_elastic and job.config.global_batch_size is not None)
MANY = Feature(f"more than {MOST_WORKERS} workers", lambda job: job.is_elastic and job.most > MOST_WORKERS,
               "up to {most} workers")
NCCL = Feature("reductions by NCCL", lambda job: job.uses_nccl, "NCCL for gradients on {host}")
GLOO = Feature("Gloo", lambda job: job.workers is not None and job.workers.controller == "Gloo")
STREAM = Feature("data that are a stream", lambda job: bool(job.streams), "the {stream}, a stream,")
TRAINING_STREAM = Feature("training data that are a stream", lambda job: TRAINING_DATA in job.streams,
                          "the training data, a stream,")
UNCOUNTED = Feature("training data that are a stream without `length`",
                    lambda job: TRAINING_DATA in job.streams and job.streams[TRAINING_DATA].length is None,
                    "the training data, a stream whose length is not declared,")
OWN_STEP = Feature("a training step of the task's own", lambda job: bool(job.own("step")),
                   "the task's own {own_step}")
OWN_LOSS = Feature("a loss of the task's own that calls the model", lambda job: bool(job.own("loss")),
                   "the task's own {own_loss}")
OWN_OPTIMIZER = Feature("an optimizer of the task's own", lambda job: bool(job.own_optimizer),
                        "the task's own {own_optimizer}()")
# fmt: on


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(list(value)) if isinstance(value, tuple) else str(value)
