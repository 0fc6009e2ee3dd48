"""What cannot be combined: what a job may have or lack; one table for checks and docs/compatibility.md."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.backends.optimizers import own_optimizer_method
from hvdtrain.config import Config
from hvdtrain.config.values import compression_of, rank_of
from hvdtrain.data.eval_sets import TRAINING_DATA
from hvdtrain.data.stream import Stream
from hvdtrain.elastic.driver.records import MOST_WORKERS
from hvdtrain.errors import ConfigError, EnvironmentFault, HvdtrainError, UsageError
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
        values: dict[str, object] = {name: shown_value(value) for name, value in self.config}
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
    holds: Callable[[Job], object]  # whether a job has it
    text: str = ""  # its name in messages if it is another one, filled in with the job's values
    joined: str = "with"  # the word before it as the second of a row

    def describe(self, job: Job) -> str:
        """Return its name in messages."""
        return job.describe(self.text or self.name.replace("`", ""))


def option(field: str, *values: object) -> Feature:
    """Return that a field has one of some values, or any other value than its default."""
    default = Config.model_fields[field].default
    text = field if default is False or default == () else f"{field} {{{field}}}"

    def holds(job: Job) -> bool:
        value = getattr(job.config, field)
        return value in values if values else value != default

    return Feature(f"`{field}` {' or '.join(map(str, values))}".strip(), holds, text)


def no_option(field: str) -> Feature:
    """Return that a field has its default."""
    return Feature(f"`{field}`", lambda job: not option(field).holds(job), joined="without")


def commands(*names: str) -> Feature:
    """Return that one of some commands is given."""
    title = " or ".join(f"`{name}`" for name in names)
    return Feature(title, lambda job: job.command in names, "{command}", "by")


def setting(name: str) -> Feature:
    """Return that a setting of Horovod is on."""
    off = ("", "0", "false")
    return Feature(
        f"`{name}`", lambda _: os.environ.get(name, "").strip().lower() not in off, f"{name}={{{name}}}"
    )


# fmt: off
SHARD, STAGES, SYNC_EVERY, SYNC_NORM = map(option, ("shard", "stages", "sync_every", "sync_batch_norm"))
OVERLAP, PLAN = option("overlap"), commands("plan")
POWERSGD = Feature("`compression` powersgd", lambda job: rank_of(job.config.compression) is not None,
                   "compression {compression}")
WHOLE = replace(POWERSGD, holds=lambda job: not compression_of(job.config.compression).parts_as)
MIX = Feature("`mixup` or `cutmix`", lambda job: job.config.mixup or job.config.cutmix)
WARMUP_EPOCHS = Feature("`warmup_epochs`",
                        lambda job: job.config.warmup_steps is None and job.config.warmup_epochs,
                        "warmup_epochs {warmup_epochs}")
WARMUP = Feature("a warm-up", lambda job: job.config.warmup_steps or WARMUP_EPOCHS.holds(job))
NO_WARMUP = replace(WARMUP, holds=lambda job: not WARMUP.holds(job), joined="without")
NO_FACTOR = Feature("`learning_rate_factor` of the task",
                    lambda job: job.task is not None and not hasattr(job.task, "learning_rate_factor"),
                    joined="without")
PARTIAL_INIT = Feature("`init_only` or `init_skip`", lambda job: job.config.init_only or job.config.init_skip)
LATE_PROFILE = Feature("`profile` of later steps",
                       lambda job: (p := job.config.profile) and p.first > (job.config.steps or math.inf),
                       "profile {profile}")
EPOCHS = Feature("`epochs`", lambda job: job.config.steps is None)
EVALUATED_AT_END = Feature("`eval_every` null", lambda job: job.config.eval_every is None)
NO_EVAL_DATA = Feature("evaluation data", lambda job: not job.has_eval_data, joined="without")
RUN_DIR_URL = Feature("a URL as `run_dir`", lambda job: is_url(job.config.run_dir or ""))
XLA = Feature("`compile` in TensorFlow",
              lambda job: job.config.compile and job.config.framework == "tf", "compile")
ELASTIC = Feature("an elastic job", lambda job: job.is_elastic, joined="in")
ELASTIC_BATCH = Feature("`global_batch_size` in an elastic job",
                        lambda job: job.is_elastic and job.config.global_batch_size is not None)
MANY = Feature(f"more than {MOST_WORKERS} workers", lambda job: job.is_elastic and job.most > MOST_WORKERS,
               "up to {most} workers")
NCCL = Feature("reductions by NCCL", lambda job: job.uses_nccl, "NCCL for gradients on {host}")
GLOO = Feature("Gloo", lambda job: job.workers is not None and job.workers.controller == "Gloo")
STREAM = Feature("data that are a stream", lambda job: job.streams, "the {stream}, a stream,")
TRAINING_STREAM = Feature("training data that are a stream", lambda job: TRAINING_DATA in job.streams,
                          "the training data, a stream,")
UNCOUNTED = Feature("training data that are a stream without `length`",
                    lambda job: TRAINING_DATA in job.streams and job.streams[TRAINING_DATA].length is None,
                    "the training data, a stream whose length is not declared,")
OWN_STEP = Feature("a training step of the task's own", lambda job: job.own("step"),
                   "the task's own {own_step}")
OWN_LOSS = Feature("a loss of the task's own that calls the model", lambda job: job.own("loss"),
                   "the task's own {own_loss}")
OWN_OPTIMIZER = Feature("an optimizer of the task's own", lambda job: job.own_optimizer,
                        "the task's own {own_optimizer}()")
# fmt: on


@dataclass(frozen=True)
class Row:
    """Two features that cannot be combined."""

    feature: Feature  # one of them
    other: Feature  # the other one
    reason: str  # why
    remedy: str = "Use one without the other."  # what to do
    kind: type[HvdtrainError] = ConfigError  # the class of the error

    def holds(self, job: Job) -> bool:
        """Return whether a job has both."""
        return bool(self.feature.holds(job) and self.other.holds(job))

    def error(self, job: Job, everywhere: bool) -> HvdtrainError:
        """Return the error of a job that has both."""
        one, other = self.feature.describe(job), f"{self.other.joined} {self.other.describe(job)}"
        everywhere &= self.kind is not EnvironmentFault  # hosts differ
        problem = f"{one} cannot be used {other}: {self.reason}"
        return self.kind(problem, job.describe(self.remedy), everywhere=everywhere)


_SIMPLER = "Use compression none or fp16."
_NO_STAGE_SPEED = "Leave stages out; metrics.jsonl has the speed of a training with stages."
_BENCH = "Plan without it; bench --sweep measures such jobs."
_INDEXED = "hvdtrain.open_parquet reads data in many files by an index, which allows it."
_DECLARED = "Declare the number of samples of an epoch: hvdtrain.stream(..., length=...)"
_EVALUATE, _AT_END = "Set eval_every, such as 1epoch.", "the only evaluation comes when training is done"
_NO_EPOCHS, _GOAL = "there are no epochs", "it goes by a metric of the evaluation"
_OWN_LOSSES = "it computes the training losses itself"

# fmt: off
ROWS = (
    # fields of the config
    Row(option("lr_schedule", "step"), no_option("lr_step_epochs"),
        "it lowers the rate at these epochs", "Give lr_step_epochs, for example [30, 60, 80]."),
    Row(option("lr_schedule", "inverse_sqrt"), NO_WARMUP,
        "it falls from the end of the warm-up", "Give warmup_epochs or warmup_steps."),
    Row(option("lr_schedule", "one_cycle"), WARMUP, "it has a warm-up of its own"),
    Row(option("lr_schedule", "plateau"), option("lr_final_fraction", 1),
        "it would never lower the learning rate", "Give a lower lr_final_fraction."),
    Row(option("early_stopping"), EVALUATED_AT_END, _AT_END, _EVALUATE),
    Row(option("lr_schedule", "plateau"), EVALUATED_AT_END, _AT_END, _EVALUATE),
    Row(PARTIAL_INIT, no_option("init"), "it chooses among the weights of init", "Give init too."),
    Row(option("resume", "auto"), no_option("run_dir"), "it searches that directory", "Give --run-dir too."),
    Row(LATE_PROFILE, option("steps"), "training ends before the first step to record"),
    Row(option("outer_optimizer"), no_option("sync_every"), "it follows local steps", "Give sync_every too."),
    Row(option("stage_cuts"), no_option("stages"), "it divides a model into stages", "Give stages too."),
    Row(XLA, SYNC_NORM, "XLA cannot communicate between workers"),
    Row(option("compression"), SYNC_EVERY, "it is for gradients, and with local steps none travel"),
    Row(SYNC_NORM, SYNC_EVERY, "it makes the workers wait for one another in every layer"),
    Row(SHARD, SYNC_EVERY, "with local steps each worker has a state of its own"),
    Row(option("shard", "gradients"), WHOLE,
        "it needs the whole gradient, which no worker has", "Use shard optimizer, or another compression."),
    Row(option("optimizer", "lars", "lamb"), SHARD,
        "its norms are those of whole parameters, of which each worker has a part"),
    Row(SHARD, STAGES, "it divides the state of whole models"),
    Row(SYNC_EVERY, STAGES, "each worker would train a whole model"),
    Row(POWERSGD, STAGES, "it compresses gradients of a whole model", _SIMPLER),
    Row(option("precision", "fp16"), STAGES, "fp16 needs one scale of the loss", "Use precision bf16."),
    *(Row(OVERLAP, other, reason) for other, reason in (
        (POWERSGD, "it sends when the backward pass has ended"),
        (option("shard", "gradients"), "they always travel during the backward pass, to save their memory"),
        (SYNC_EVERY, "local steps send no gradients"),
        (XLA, "the backward pass that it compiles gives all gradients at once"),
        (STAGES, "a worker's passes alternate with messages to other stages"),
    )),
    Row(XLA, STAGES, "the passes of a stage are several functions, not for XLA"),
    # a number of workers that changes, and what connects them
    Row(MANY, ELASTIC, f"the vector that is reduced in every step has places for {MOST_WORKERS}",
        f"Lower --max-np to {MOST_WORKERS} or less."),
    Row(POWERSGD, ELASTIC, "what a worker has not sent yet of its gradients is lost with it", _SIMPLER),
    *(Row(setting(name), ELASTIC, "Horovod keeps what it found for a fixed number of workers",
          f"Leave {name} out, or start the job without --min-np and --host-discovery-script.",
          EnvironmentFault) for name in FIXED_SETTINGS),
    Row(NCCL, ELASTIC, "it needs a fixed number of workers",
        "Use --device cpu, or a Horovod that is built without --gpu nccl.", EnvironmentFault),
    Row(option("max_time"), ELASTIC, "the launcher decides when its workers stop",
        "Send SIGTERM to horovodrun after that time, as the command timeout does."),
    Row(STAGES, ELASTIC, "a lost worker takes its stage with it"),
    Row(SHARD, ELASTIC, "the part of the state that a worker keeps is lost with it"),
    Row(SYNC_EVERY, ELASTIC, "what a worker has learned since the last synchronisation is lost with it"),
    Row(RUN_DIR_URL, ELASTIC, "uploads do not follow workers that come and go yet",
        "Give a directory that all hosts share."),
    Row(STAGES, GLOO, "stages send activations to one another by MPI's point-to-point messages",
        "Start the job over MPI: horovodrun --mpi, or mpirun."),
    # commands
    Row(STAGES, commands("export", "predict", "load"), "no worker has the whole model", "Leave stages out."),
    Row(STAGES, commands("bench", "batch-find"), "each worker has the whole model in it", _NO_STAGE_SPEED),
    Row(SYNC_EVERY, commands("batch-find", "lr-find"), "local steps are each worker's own",
        "Leave sync_every out, and start {command} with one worker, whose steps local steps are."),
    Row(option("global_batch_size"), PLAN, "a worker's batch shrinks as workers are added",
        "Give --batch-size, that of a worker: G/N for G samples on N workers, and read their row.",
        UsageError),
    Row(SYNC_NORM, PLAN, "messages in every batch-norm layer are not predicted", _BENCH, UsageError),
    Row(SHARD, PLAN, "it gathers parameters in every step, which is not predicted", _BENCH, UsageError),
    Row(STAGES, PLAN, "messages between stages are not predicted", _NO_STAGE_SPEED, UsageError),
    Row(OWN_STEP, PLAN, "what it sums in a step is not predicted", _BENCH, UsageError),
    Row(option("on_bad_sample", "skip"), commands("predict"), "predictions have a row for every sample",
        "Leave it out, or give the task predict_data() without the samples that cannot be read.", UsageError),
    Row(STREAM, commands("predict"), "predictions go by the index of their samples", _INDEXED, UsageError),
    # data without an index
    Row(STREAM, ELASTIC, "its place in each shard depends on a fixed number of workers", _INDEXED),
    Row(STREAM, option("on_bad_sample", "skip"), "the sample after a bad one is not known",
        "Leave the samples out in the source."),
    Row(STREAM, STAGES, "all workers of a replica read the same samples", _INDEXED),
    Row(TRAINING_STREAM, SYNC_EVERY, "local steps need an index", _INDEXED),
    Row(UNCOUNTED, EPOCHS, _NO_EPOCHS, f"{_DECLARED}, or give --steps."),
    Row(UNCOUNTED, WARMUP_EPOCHS, _NO_EPOCHS, f"{_DECLARED}, or give warmup_steps."),
    Row(UNCOUNTED, option("lr_schedule", "step", "cyclic", "cosine_restarts", "task"),
        _NO_EPOCHS, f"{_DECLARED}."),
    # what a task brings
    *(Row(feature, NO_EVAL_DATA, _GOAL, "Give the task eval_data(), or leave it out.") for feature in (
        option("keep_best"), option("early_stopping"), option("lr_schedule", "plateau"))),
    Row(option("lr_schedule", "task"), NO_FACTOR, "it is what that method returns",
        "Give the task learning_rate_factor(progress), or use another lr_schedule."),
    Row(STAGES, OWN_LOSS, "no worker has the whole model",
        "Give the task a loss, which may be a function of (outputs, batch)."),
    Row(STAGES, OWN_STEP, "it calls the whole model itself"),
    Row(SHARD, OWN_STEP, "it updates whole parameters itself"),
    Row(SYNC_EVERY, OWN_STEP, "it sums its gradients over all workers itself"),
    Row(OVERLAP, OWN_STEP, "it decides itself when it sums its gradients"),
    Row(option("accumulate"), OWN_STEP, "each micro-batch would update the parameters",
        "Use a smaller model or batch_size, or leave accumulate out."),
    Row(ELASTIC_BATCH, OWN_STEP, "with fewer workers a step has more micro-batches",
        "Give batch_size, that of one worker."),
    Row(option("precision", "fp16"), OWN_STEP, "fp16 needs one scale of the loss", "Use precision bf16."),
    Row(POWERSGD, OWN_STEP, "a step may reduce several gradients", _SIMPLER),
    Row(option("compile"), OWN_STEP, "there is no single forward and backward pass to compile",
        "Compile the parts in the task itself."),
    Row(MIX, OWN_STEP, _OWN_LOSSES, "Mix samples and losses in train_collate."),
    Row(option("label_smoothing"), OWN_STEP, _OWN_LOSSES, "Smooth the targets there."),
    Row(MIX, OWN_LOSS, "it mixes the losses of the task's loss",
        "Give the task a loss, which may be a function of (outputs, batch), or mix in train_collate."),
    Row(option("label_smoothing"), OWN_LOSS, "it acts on the named loss cross_entropy",
        "Smooth the targets in the task's loss."),
    Row(option("parameter_groups"), OWN_OPTIMIZER, "they are options of the built-in optimizers",
        "Make the groups in {own_optimizer}()."),
    *(Row(one, OWN_OPTIMIZER, "it may not compute the same with a part of the parameters",
          "Choose one of hvdtrain's optimizers.") for one in (SHARD, STAGES)),
    Row(SYNC_EVERY, OWN_OPTIMIZER, "what it keeps may mean nothing when it is averaged",
        "Choose one of hvdtrain's optimizers."),
)
# fmt: on


def check(job: Job, *, everywhere: bool = True) -> None:
    """Check that what a job has can be combined. It is called again when more is known of the job."""
    settled = Job(job.config)  # what the config alone says
    for row in ROWS:
        if row.holds(job) and (job.task is None or not row.holds(settled)):
            raise row.error(job, everywhere)


def shown_value(value: object) -> str:
    """Return the value of a field as messages have it."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(list(value)) if isinstance(value, tuple) else str(value)
