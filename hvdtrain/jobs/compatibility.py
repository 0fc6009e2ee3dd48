"""What cannot be combined: one table, for checks before training, for notes and for docs/config.md."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain import frameworks
from hvdtrain.agreement import Workers
from hvdtrain.backends.named_optimizers import own_optimizer_method
from hvdtrain.compression import rank_of
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, EnvironmentFault, HvdtrainError
from hvdtrain.frameworks import FRAMEWORKS

_MOST_WORKERS = 256  # of an elastic job
# settings of Horovod that keep what they learned, or their groups of workers, for the life of a process
_FIXED_SETTINGS = (
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_TORUS_ALLREDUCE",
    "HOROVOD_AUTOTUNE",
)


@dataclass(frozen=True)
class Job:
    """What is known of a job when it is checked.

    Attributes:
        config: the resolved config.
        task: the task; None before it is made.
        workers: the workers; None before they have started.
        uses_nccl: whether Horovod reduces gradients by NCCL.
        command: what is done; empty for training.
    """

    config: Config
    task: Any = None
    workers: Workers | None = None
    uses_nccl: bool = False
    command: str = ""

    @property
    def own_step(self) -> str:
        """The task's method in place of a training step; empty if it has none."""
        method = FRAMEWORKS[self.config.framework].step_method
        return method if getattr(self.task, method, None) is not None else ""

    @property
    def own_optimizer(self) -> str:
        """The task's method that makes its optimizers; empty if it has none."""
        return own_optimizer_method(self.task, self.config)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.workers is not None and self.workers.is_elastic

    def describe(self, text: str) -> str:
        """Return a text filled in with the job's values."""
        values: dict[str, object] = {name: _shown(value) for name, value in self.config}
        values |= {name: os.environ.get(name, "") for name in _FIXED_SETTINGS}
        values |= {"own_step": self.own_step, "own_optimizer": self.own_optimizer}
        if self.workers is not None:
            values |= {"host": self.workers.host, "most": self.workers.most}
        return text.format_map(values)


@dataclass(frozen=True)
class Feature:
    """Something that a job may have, or lack.

    Attributes:
        name: its name in the documentation.
        text: its name in messages, filled in with the job's values.
        holds: whether a job has it.
        joined: the word before it as the second of a row.
    """

    name: str
    text: str
    holds: Callable[[Job], bool]
    joined: str = "with"


@dataclass(frozen=True)
class Row:
    """Two features that cannot be combined.

    Attributes:
        feature: one of them.
        other: the other one.
        reason: why.
        remedy: what to do.
        kind: the class of the error.
    """

    feature: Feature
    other: Feature
    reason: str
    remedy: str
    kind: type[HvdtrainError] = ConfigError

    def error(self, job: Job, everywhere: bool) -> HvdtrainError:
        """Return the error of a job that has both."""
        one, other = self.feature.text, f"{self.other.joined} {self.other.text}"
        problem = job.describe(f"{one} cannot be used {other}: {self.reason}")
        everywhere &= self.kind is not EnvironmentFault  # hosts differ
        return self.kind(problem, job.describe(self.remedy), everywhere=everywhere)


def _set(field: str, *values: object) -> Feature:
    """Return that a field has one of some values, or any other value than its default."""
    default = Config.model_fields[field].default
    name = f"`{field}` {' or '.join(map(str, values))}".strip()
    text = field if default is False else f"{field} {{{field}}}"

    def holds(job: Job) -> bool:
        value = getattr(job.config, field)
        return value in values if values else value != default

    return Feature(name, text, holds)


def _of_config(name: str, field: str, holds: Callable[[Config], bool]) -> Feature:
    """Return that a config meets a condition.

    Args:
        name: its name in the documentation.
        field: the field that messages name with its value.
        holds: whether a config meets it.
    """
    return Feature(name, f"{field} {{{field}}}", lambda job: holds(job.config))


def _unset(field: str) -> Feature:
    """Return that a field has its default."""
    given = _set(field).holds
    return Feature(f"`{field}`", field, lambda job: not given(job), "without")


def _command(name: str) -> Feature:
    return Feature(f"the command `{name}`", name, lambda job: job.command == name, "by")


def _setting(name: str) -> Feature:
    """Return that a setting of Horovod is on."""

    def holds(_: Job) -> bool:
        return os.environ.get(name, "").strip().lower() not in ("", "0", "false")

    return Feature(f"`{name}`", f"{name}={{{name}}}", holds)


SHARD, STAGES, SYNC_EVERY = _set("shard"), _set("stages"), _set("sync_every")
COMPRESSED, BF16, SYNC_NORM = _set("compression"), _set("compression", "bf16"), _set("sync_batch_norm")
POWERSGD = _of_config("`compression` powersgd", "compression", lambda c: rank_of(c.compression) is not None)
WARMUP_EPOCHS = _of_config(
    "`warmup_epochs`", "warmup_epochs", lambda c: c.warmup_steps is None and c.warmup_epochs > 0
)
WARMUP_STEPS = _of_config("`warmup_steps`", "warmup_steps", lambda c: bool(c.warmup_steps))
LATE_PROFILE = _of_config(
    "`profile` of later steps", "profile", lambda c: bool(c.profile and c.steps and c.profile.first > c.steps)
)
XLA = Feature(
    "`compile` in TensorFlow", "compile", lambda job: job.config.compile and job.config.framework == "tf"
)
ELASTIC = Feature("an elastic job", "an elastic job", lambda job: job.is_elastic, "in")
ELASTIC_BATCH = Feature(
    "`global_batch_size` in an elastic job",
    "global_batch_size in an elastic job",
    lambda job: job.is_elastic and job.config.global_batch_size is not None,
)
MANY = Feature(
    f"more than {_MOST_WORKERS} workers",
    "up to {most} workers",
    lambda job: job.workers is not None and job.is_elastic and job.workers.most > _MOST_WORKERS,
)
NCCL = Feature("reductions by NCCL", "NCCL for gradients on {host}", lambda job: job.uses_nccl)
GLOO = Feature("Gloo", "Gloo", lambda job: job.workers is not None and job.workers.controller == "Gloo")
OWN_STEP = Feature(
    "a training step of the task's own", "the task's own {own_step}", lambda job: bool(job.own_step)
)
OWN_OPTIMIZER = Feature(
    "an optimizer of the task's own", "the task's own {own_optimizer}()", lambda job: bool(job.own_optimizer)
)

_LEAVE_ONE, _NO_STAGES, _NO_SHARD = "Leave one of them out.", "Leave stages out.", "Leave shard out."
_NO_LOCAL_STEPS, _SIMPLER = "Leave sync_every out.", "Use compression none or fp16."
_OWN_WARMUP, _OWN_LOSSES = "it has a warm-up of its own", "it computes the training losses itself"
_OWN_MIXING = "Mix the samples in the task's train_collate, and their losses there."

# fmt: off
ROWS = (
    # fields of the config
    Row(_set("lr_schedule", "step"), _unset("lr_step_epochs"), "it lowers the learning rate at these epochs",
        "Give lr_step_epochs, for example [30, 60, 80]."),
    Row(_set("lr_schedule", "one_cycle"), WARMUP_EPOCHS, _OWN_WARMUP, "Leave warmup_epochs out."),
    Row(_set("lr_schedule", "one_cycle"), WARMUP_STEPS, _OWN_WARMUP, "Leave warmup_steps out."),
    Row(_set("lr_schedule", "plateau"), _set("lr_final_fraction", 1),
        "it would never lower the learning rate", "Give a lower lr_final_fraction."),
    Row(_set("init_only"), _unset("init"), "it chooses among the weights of init", "Give init too."),
    Row(_set("init_skip"), _unset("init"), "it chooses among the weights of init", "Give init too."),
    Row(_set("resume", "auto"), _unset("run_dir"), "it searches the run directory", "Give --run-dir too."),
    Row(LATE_PROFILE, _set("steps"), "training ends before the first step to record",
        "Give earlier steps to profile."),
    Row(_set("outer_optimizer"), _unset("sync_every"), "it follows local steps",
        "Give sync_every too, or leave outer_optimizer out."),
    Row(_set("stage_cuts"), _unset("stages"), "it divides a model into stages",
        "Give stages too, or leave stage_cuts out."),
    Row(XLA, SYNC_NORM, "XLA cannot communicate between workers", _LEAVE_ONE),
    Row(COMPRESSED, SYNC_EVERY, "it is for gradients, and with local steps none travel", _LEAVE_ONE),
    Row(SYNC_NORM, SYNC_EVERY,
        "it makes the workers wait for one another in every layer, which local steps are there to avoid",
        _LEAVE_ONE),
    Row(SHARD, SYNC_EVERY,
        "it divides one state among the workers, and with local steps each has its own", _LEAVE_ONE),
    Row(_set("shard", "gradients"), POWERSGD, "PowerSGD needs the whole gradient, which no worker has",
        "Use shard optimizer, or another compression."),
    Row(SHARD, STAGES, "it divides the state of whole models among the workers, and no worker has one",
        _LEAVE_ONE),
    Row(SYNC_EVERY, STAGES, "each worker would train a whole model, and no worker has one", _LEAVE_ONE),
    Row(POWERSGD, STAGES, "it compresses the gradients of a whole model, and no worker has one", _SIMPLER),
    Row(BF16, STAGES, "it divides the gradients of a whole model, and no worker has one", _SIMPLER),
    Row(XLA, STAGES, "the passes of a stage are functions of their own, not for XLA", "Leave compile out."),
    # a number of workers that changes, and what connects them
    Row(MANY, ELASTIC, f"the vector that is reduced in every step has places for {_MOST_WORKERS}",
        f"Lower --max-np to {_MOST_WORKERS} or less."),
    Row(POWERSGD, ELASTIC, "what a worker has not sent yet of its gradients is lost with it", _SIMPLER),
    Row(BF16, ELASTIC, "gradients are divided among a fixed number of workers", _SIMPLER),
    *(Row(_setting(name), ELASTIC, "Horovod keeps what it found for a fixed number of workers",
          f"Leave {name} out, or start the job without --min-np and --host-discovery-script.",
          EnvironmentFault) for name in _FIXED_SETTINGS),
    Row(NCCL, ELASTIC, "it needs a fixed number of workers", "Use --device cpu, a Horovod that is built "
        "without --gpu nccl, or a fixed number of workers.", EnvironmentFault),
    Row(STAGES, ELASTIC, "a lost worker takes its stage with it", _NO_STAGES),
    Row(SHARD, ELASTIC, "the part of the state that a worker keeps is lost with it", _NO_SHARD),
    Row(SYNC_EVERY, ELASTIC, "what a worker has learned since the last synchronisation is lost with it",
        _NO_LOCAL_STEPS),
    Row(STAGES, GLOO, "stages send activations to one another by MPI's point-to-point messages",
        "Start the job over MPI: horovodrun --mpi, or mpirun."),
    # what a task brings
    Row(STAGES, OWN_STEP, "it calls the whole model itself", "Leave stages out, or {own_step}."),
    Row(SHARD, OWN_STEP, "it updates whole parameters itself", _NO_SHARD),
    Row(SYNC_EVERY, OWN_STEP, "it sums its gradients over all workers itself", _NO_LOCAL_STEPS),
    Row(_set("accumulate"), OWN_STEP,
        "it updates the parameters itself, and micro-batches would each be updated",
        "Use a smaller model or batch_size, or leave accumulate out."),
    Row(ELASTIC_BATCH, OWN_STEP,
        "with fewer workers a step has more micro-batches, and each would update the parameters",
        "Give batch_size, that of one worker."),
    Row(_set("precision", "fp16"), OWN_STEP,
        "fp16 needs one scale of the loss, and a step may have several losses",
        "Use precision bf16, which needs none."),
    Row(POWERSGD, OWN_STEP,
        "what is not sent yet belongs to one gradient of a step, and a step may reduce several",
        "Use compression fp16 or none."),
    Row(_set("compile"), OWN_STEP, "there is no single forward and backward pass to compile",
        "Compile the parts in the task itself."),
    Row(_set("mixup"), OWN_STEP, _OWN_LOSSES, _OWN_MIXING),
    Row(_set("cutmix"), OWN_STEP, _OWN_LOSSES, _OWN_MIXING),
    Row(_set("label_smoothing"), OWN_STEP, _OWN_LOSSES, "Smooth the targets there."),
    Row(SHARD, OWN_OPTIMIZER, "whether it computes the same with a part of the parameters is not known",
        "Leave shard out, or choose one of hvdtrain's optimizers."),
    Row(STAGES, OWN_OPTIMIZER, "whether it computes the same with the parameters of one stage is not known",
        "Leave stages out, or choose one of hvdtrain's optimizers."),
)
# fmt: on

# what an option needs of a backend
NEEDS = (
    (_set("compile"), frameworks.COMPILE),
    (SYNC_NORM, frameworks.SYNC_BATCH_NORM),
    (_set("checkpoint_activations"), frameworks.ACTIVATION_CHECKPOINTING),
    (_set("precision"), frameworks.HALF_PRECISION),
    (COMPRESSED, frameworks.COMPRESSION),
    (SYNC_EVERY, frameworks.LOCAL_STEPS),
    (SHARD, frameworks.SHARDED_STATE),
    (STAGES, frameworks.SPLIT_MODELS),
    (_set("ema_decay"), frameworks.EMA),
    (_set("label_smoothing"), frameworks.LABEL_SMOOTHING),
    (_set("parameter_groups"), frameworks.PARAMETER_GROUPS),
    (_set("decay_norms_and_biases"), frameworks.PARAMETER_GROUPS),
    (_set("optimizer", "lars", "lamb"), frameworks.LARGE_BATCH),
)


def find_conflict(job: Job, *, everywhere: bool = True) -> HvdtrainError | None:
    """Return the error of the first two features of a job that cannot be combined; None if there are none.

    Args:
        job: what is known of the job.
        everywhere: whether all workers have the same config.
    """
    for row in ROWS:
        if row.feature.holds(job) and row.other.holds(job):
            return row.error(job, everywhere)
    backend = FRAMEWORKS[job.config.framework]
    for feature, capability in NEEDS:
        if capability not in backend.capabilities and feature.holds(job):
            option = job.describe(feature.text)
            return ConfigError(
                f"{option} cannot be used with {backend.title}: its backend cannot do this",
                f"Leave {option.partition(' ')[0]} out, or use another framework.",
                everywhere=everywhere,
            )
    return None


def check(job: Job, *, everywhere: bool = True) -> None:
    """Check that what a job has can be combined. It is called again when more is known of the job.

    Args:
        job: what is known of the job.
        everywhere: whether all workers have the same config.

    Raises:
        HvdtrainError: naming two features, why they cannot be combined, and what to do.
    """
    error = find_conflict(job, everywhere=everywhere)
    if error is not None:
        raise error


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(list(value)) if isinstance(value, tuple) else str(value)
