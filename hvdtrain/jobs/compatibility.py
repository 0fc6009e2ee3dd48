"""What cannot be combined: one table, for checks before training, for notes and for docs/config.md."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from hvdtrain.config import Config
from hvdtrain.config.values import senders
from hvdtrain.elastic.driver.cluster import MOST_WORKERS
from hvdtrain.errors import ConfigError, EnvironmentFault, HvdtrainError, UsageError
from hvdtrain.jobs import features as f
from hvdtrain.jobs.features import Feature, Job, commands, no_option, option, setting


@dataclass(frozen=True)
class Row:
    """Two features that cannot be combined."""

    feature: Feature  # one of them
    other: Feature  # the other one
    reason: str  # why
    remedy: str  # what to do
    kind: type[HvdtrainError] = ConfigError  # the class of the error

    def holds(self, job: Job) -> bool:
        """Return whether a job has both."""
        return self.feature.holds(job) and self.other.holds(job)

    def error(self, job: Job, everywhere: bool) -> HvdtrainError:
        """Return the error of a job that has both."""
        one, other = self.feature.describe(job), f"{self.other.joined} {self.other.describe(job)}"
        everywhere &= self.kind is not EnvironmentFault  # hosts differ
        problem = f"{one} cannot be used {other}: {self.reason}"
        return self.kind(problem, job.describe(self.remedy), everywhere=everywhere)


_LEAVE_ONE, _NO_STAGES, _NO_SHARD = "Leave one of them out.", "Leave stages out.", "Leave shard out."
_NO_LOCAL_STEPS, _SIMPLER = "Leave sync_every out.", "Use compression none or fp16."
_NO_STAGE_SPEED = "Leave stages out; metrics.jsonl has the speed of a training with stages."
_BENCH = "Plan without it; bench --sweep measures such jobs."
_INDEXED = "hvdtrain.open_parquet and open_webdataset read data in many files by an index, which allows it."
_DECLARED = "Declare the number of samples of an epoch: hvdtrain.stream(..., length=...)"
_AT_END = "the only evaluation comes when training is done"
_MIXED, _MIX = (
    "it mixes the losses of the task's loss",
    ("Give the task a loss, which may be a function of (outputs, batch), or mix in train_collate."),
)
_OWN_WARMUP, _OWN_LOSSES = "it has a warm-up of its own", "it computes the training losses itself"
_OWN_MIXING = "Mix the samples in the task's train_collate, and their losses there."

# fmt: off
ROWS = (
    # fields of the config
    Row(option("lr_schedule", "step"), no_option("lr_step_epochs"), "it lowers the rate at these epochs",
        "Give lr_step_epochs, for example [30, 60, 80]."),
    Row(option("lr_schedule", "one_cycle"), f.WARMUP_EPOCHS, _OWN_WARMUP, "Leave warmup_epochs out."),
    Row(option("lr_schedule", "one_cycle"), f.WARMUP_STEPS, _OWN_WARMUP, "Leave warmup_steps out."),
    Row(option("lr_schedule", "plateau"), option("lr_final_fraction", 1),
        "it would never lower the learning rate", "Give a lower lr_final_fraction."),
    Row(option("early_stopping"), f.EVALUATED_AT_END, _AT_END,
        "Set eval_every, such as 1epoch or a number of steps, or leave early_stopping out."),
    Row(option("lr_schedule", "plateau"), f.EVALUATED_AT_END, _AT_END,
        "Set eval_every, such as 1epoch or a number of steps, or use another lr_schedule than plateau."),
    Row(option("init_only"), no_option("init"), "it chooses among the weights of init", "Give init too."),
    Row(option("init_skip"), no_option("init"), "it chooses among the weights of init", "Give init too."),
    Row(option("resume", "auto"), no_option("run_dir"), "it searches that directory", "Give --run-dir too."),
    Row(f.LATE_PROFILE, option("steps"), "training ends before the first step to record",
        "Give earlier steps to profile."),
    Row(option("outer_optimizer"), no_option("sync_every"), "it follows local steps",
        "Give sync_every too, or leave outer_optimizer out."),
    Row(option("stage_cuts"), no_option("stages"), "it divides a model into stages",
        "Give stages too, or leave stage_cuts out."),
    Row(f.XLA, f.SYNC_NORM, "XLA cannot communicate between workers", _LEAVE_ONE),
    Row(f.COMPRESSED, f.SYNC_EVERY, "it is for gradients, and with local steps none travel", _LEAVE_ONE),
    Row(f.SYNC_NORM, f.SYNC_EVERY,
        "it makes the workers wait for one another in every layer, which local steps are there to avoid",
        _LEAVE_ONE),
    Row(f.SHARD, f.SYNC_EVERY,
        "it divides one state among the workers, and with local steps each has its own", _LEAVE_ONE),
    Row(option("shard", "gradients"), f.WHOLE, "it needs the whole gradient, which no worker has",
        "Use shard optimizer, or another compression."),
    Row(f.SHARD, f.STAGES, "it divides the state of whole models among the workers, and no worker has one",
        _LEAVE_ONE),
    Row(f.SYNC_EVERY, f.STAGES, "each worker would train a whole model, and no worker has one", _LEAVE_ONE),
    Row(f.POWERSGD, f.STAGES, "it compresses gradients of a whole model, and no worker has one", _SIMPLER),
    *(Row(f.OVERLAP, other, reason, "Leave overlap out.") for other, reason in (
        (f.POWERSGD, "it sends when the backward pass has ended"),
        (option("shard", "gradients"), "they always travel during the backward pass, to save their memory"),
        (f.SYNC_EVERY, "local steps send no gradients"),
        (f.XLA, "the backward pass that it compiles gives all gradients at once"),
        (f.STAGES, "a worker's passes alternate with messages to other stages"),
    )),
    Row(f.XLA, f.STAGES, "the passes of a stage are several functions, not for XLA", "Leave compile out."),
    # a number of workers that changes, and what connects them
    Row(f.MANY, f.ELASTIC, f"the vector that is reduced in every step has places for {MOST_WORKERS}",
        f"Lower --max-np to {MOST_WORKERS} or less."),
    Row(f.POWERSGD, f.ELASTIC, "what a worker has not sent yet of its gradients is lost with it", _SIMPLER),
    *(Row(setting(name), f.ELASTIC, "Horovod keeps what it found for a fixed number of workers",
          f"Leave {name} out, or start the job without --min-np and --host-discovery-script.",
          EnvironmentFault) for name in f.FIXED_SETTINGS),
    Row(f.NCCL, f.ELASTIC, "it needs a fixed number of workers", "Use --device cpu, a Horovod that is built "
        "without --gpu nccl, or a fixed number of workers.", EnvironmentFault),
    Row(f.STAGES, f.ELASTIC, "a lost worker takes its stage with it", _NO_STAGES),
    Row(f.SHARD, f.ELASTIC, "the part of the state that a worker keeps is lost with it", _NO_SHARD),
    Row(f.SYNC_EVERY, f.ELASTIC, "what a worker has learned since the last synchronisation is lost with it",
        _NO_LOCAL_STEPS),
    Row(f.RUN_DIR_URL, f.ELASTIC, "uploads do not follow workers that come and go yet",
        "Give a directory that all hosts share, or start the job with a fixed number of workers."),
    Row(f.STAGES, f.GLOO, "stages send activations to one another by MPI's point-to-point messages",
        "Start the job over MPI: horovodrun --mpi, or mpirun."),
    # commands
    Row(f.STAGES, commands("export", "predict", "load"), "no worker has the whole model",
        "Leave stages out for {command}."),
    Row(f.STAGES, commands("bench"), "it measures what a worker computes alone, and no stage trains alone",
        _NO_STAGE_SPEED),
    Row(f.STAGES, commands("batch-find"), "it tries sizes with few workers, each with the whole model",
        _NO_STAGE_SPEED),
    Row(f.SYNC_EVERY, commands("batch-find", "lr-find"),
        "it compares single steps of all workers, and local steps are each worker's own",
        "Leave sync_every out, and start {command} with one worker, whose steps local steps are."),
    Row(option("global_batch_size"), f.PLAN,
        "a worker's batch shrinks as workers are added, which is not measured",
        "Give --batch-size, that of a worker: G/N for G samples on N workers, and read their row.",
        UsageError),
    Row(f.SYNC_NORM, f.PLAN, "messages in every batch-norm layer are not predicted", _BENCH, UsageError),
    Row(f.SHARD, f.PLAN, "it gathers parameters in every step, which is not predicted", _BENCH, UsageError),
    Row(f.STAGES, f.PLAN, "messages between stages are not predicted", _NO_STAGE_SPEED, UsageError),
    Row(f.OWN_STEP, f.PLAN, "it may sum gradients several times in a step, which is not predicted", _BENCH,
        UsageError),
    Row(f.PLANNED_STEPS, f.OWN_OPTIMIZER, "how much of its state it sends is unknown", _BENCH, UsageError),
    Row(option("on_bad_sample", "skip"), commands("predict"), "predictions have a row for every sample",
        "Leave it out, or give the task predict_data() without the samples that cannot be read.", UsageError),
    Row(f.STREAM, commands("predict"), "predictions go by the index of their samples", _INDEXED, UsageError),
    # data without an index
    Row(f.STREAM, f.ELASTIC, "its place in each shard depends on a fixed number of workers", _INDEXED),
    Row(f.STREAM, option("on_bad_sample", "skip"), "the sample after a bad one is not known",
        "Leave the samples out in the source, or leave on_bad_sample out."),
    Row(f.STREAM, f.STAGES, "all workers of a replica read the same samples, and parts of a stream are "
        "distributed to single workers", _INDEXED),
    Row(f.TRAINING_STREAM, f.SYNC_EVERY, "local steps need an index", _INDEXED),
    Row(f.UNCOUNTED, f.EPOCHS, "there are no epochs", f"{_DECLARED}, or give --steps."),
    Row(f.UNCOUNTED, f.WARMUP_EPOCHS, "there are no epochs", f"{_DECLARED}, or give warmup_steps."),
    Row(f.UNCOUNTED, option("lr_schedule", "step", "cyclic"), "there are no epochs", f"{_DECLARED}."),
    # what a task brings
    *(Row(feature, f.NO_EVAL_DATA, "it goes by a metric of the evaluation",
          f"Give the task eval_data(), or {rest}.")
      for feature, rest in ((option("keep_best"), "leave keep_best out"),
                            (option("early_stopping"), "leave early_stopping out"),
                            (option("lr_schedule", "plateau"), "use another lr_schedule than plateau"))),
    Row(f.STAGES, f.OWN_STEP, "it calls the whole model itself", "Leave stages out, or {own_step}."),
    Row(f.SHARD, f.OWN_STEP, "it updates whole parameters itself", _NO_SHARD),
    Row(f.SYNC_EVERY, f.OWN_STEP, "it sums its gradients over all workers itself", _NO_LOCAL_STEPS),
    Row(f.OVERLAP, f.OWN_STEP, "it decides itself when it sums its gradients", "Leave overlap out."),
    Row(option("accumulate"), f.OWN_STEP,
        "it updates the parameters itself, and micro-batches would each be updated",
        "Use a smaller model or batch_size, or leave accumulate out."),
    Row(f.ELASTIC_BATCH, f.OWN_STEP,
        "with fewer workers a step has more micro-batches, and each would update the parameters",
        "Give batch_size, that of one worker."),
    Row(option("precision", "fp16"), f.OWN_STEP,
        "fp16 needs one scale of the loss, and a step may have several losses",
        "Use precision bf16, which needs none."),
    Row(f.POWERSGD, f.OWN_STEP,
        "what is not sent yet belongs to one gradient of a step, and a step may reduce several",
        "Use compression fp16 or none."),
    Row(option("compile"), f.OWN_STEP, "there is no single forward and backward pass to compile",
        "Compile the parts in the task itself."),
    Row(option("mixup"), f.OWN_STEP, _OWN_LOSSES, _OWN_MIXING),
    Row(option("cutmix"), f.OWN_STEP, _OWN_LOSSES, _OWN_MIXING),
    Row(option("label_smoothing"), f.OWN_STEP, _OWN_LOSSES, "Smooth the targets there."),
    Row(option("mixup"), f.OWN_LOSS, _MIXED, _MIX),
    Row(option("cutmix"), f.OWN_LOSS, _MIXED, _MIX),
    Row(option("label_smoothing"), f.OWN_LOSS, "it acts on the named loss cross_entropy",
        "Leave label_smoothing out, or smooth the targets in the task's loss."),
    Row(option("parameter_groups"), f.OWN_OPTIMIZER, "they are options of the built-in optimizers",
        "Leave parameter_groups out and make the groups in {own_optimizer}()."),
    Row(f.SHARD, f.OWN_OPTIMIZER, "whether it computes the same with a part of the parameters is not known",
        "Leave shard out, or choose one of hvdtrain's optimizers."),
    Row(f.STAGES, f.OWN_OPTIMIZER, "whether it computes the same with parameters of one stage is not known",
        "Leave stages out, or choose one of hvdtrain's optimizers."),
)
# fmt: on

# fmt: off
_BUILT_IN = ("optimizer", "momentum", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
             "decay_norms_and_biases")
_OUTER = ("outer_optimizer", "outer_learning_rate", "outer_momentum")
# options and the values of another one that use them
_USED_WITH: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("optimizer", ("sgd", "lars"), ("momentum",)),
    ("optimizer", ("adamw", "lamb"), ("adam_beta1", "adam_beta2", "adam_epsilon")),
    ("optimizer", ("sgd", "adamw"), ("decay_norms_and_biases",)),
    ("lr_schedule", ("cosine", "linear", "cyclic", "plateau"), ("lr_final_fraction",)),
    ("lr_schedule", ("step",), ("lr_step_epochs", "lr_step_factor")),
    ("lr_schedule", ("cyclic",), ("lr_cycle_epochs",)),
    ("lr_schedule", ("plateau",), ("plateau_metric", "plateau_patience", "plateau_factor")),
)
# options, when they have no effect, and why; the last row that holds counts
_UNUSED: tuple[tuple[tuple[str, ...], Callable[[Config], object], str], ...] = (
    *(
        (names, lambda c, by=by, ok=values: getattr(c, by) not in ok, f"{by} {{{by}}} does not use it")
        for by, values, names in _USED_WITH
    ),
    (("decay_norms_and_biases",), lambda c: not c.weight_decay, "weight_decay is 0"),
    (("early_stopping_patience",), lambda c: c.early_stopping is None, "early_stopping names no metric"),
    (_OUTER[1:], lambda c: c.outer_optimizer != "nesterov", "outer_optimizer is not nesterov"),
    (_OUTER, lambda c: c.sync_every is None, "sync_every is not given"),
    (("base_batch_size", "rescale_epochs"), lambda c: c.lr_scaling == "none", "lr_scaling is none"),
    (("lr_scaling",), lambda c: c.global_batch_size and not c.base_batch_size,
     "with global_batch_size, learning_rate refers to the global batch unless base_batch_size is set"),
    (("lr_scaling",), lambda c: c.sync_every and not c.base_batch_size,
     "with sync_every, learning_rate refers to each worker's batch unless base_batch_size is set"),
    (("rescale_epochs",), lambda c: c.global_batch_size and c.sync_every is None,
     "with global_batch_size, the peak does not depend on the number of workers"),
    (("rescale_epochs",), lambda c: c.sync_every and not (c.global_batch_size and c.base_batch_size),
     "with sync_every, the peak does not depend on the number of workers"),
    (("track_checkpoints",), lambda c: not senders(c.track), "track names no tracker"),
    (("read_threads",), lambda c: c.read_workers > 0, "read_workers reads the samples"),
)
# fmt: on


def check(job: Job, *, everywhere: bool = True) -> None:
    """Check that what a job has can be combined. It is called again when more is known of the job.

    What contradicts itself in the config is found before the task is made: commands change the config later.

    Args:
        job: what is known of the job.
        everywhere: whether all workers have the same config.

    Raises:
        HvdtrainError: naming the first two features that cannot be combined, why, and what to do.
    """
    settled = Job(job.config)  # what the config alone says
    for row in ROWS:
        if row.holds(job) and (job.task is None or not row.holds(settled)):
            raise row.error(job, everywhere)


def unused_options(
    config: Config, given: Collection[str], *, own_optimizer: bool, has_eval_data: bool
) -> list[str]:
    """Return a note for each field that the user set and that has no effect.

    Args:
        config: the resolved config.
        given: the fields that the user set.
        own_optimizer: whether the task brings its own optimizer.
        has_eval_data: whether the task has evaluation data.
    """
    own = dict.fromkeys(_BUILT_IN if own_optimizer else (), "the task brings its own optimizer")
    found = {name: reason for names, holds, reason in _UNUSED if holds(config) for name in names}
    reasons = {**own, **found, **own}  # the task's own optimizer comes first, and its reason counts
    if not has_eval_data:
        reasons |= dict.fromkeys(("eval_every", "eval_batch_size"), "the task has no evaluation data")
    job = Job(config)
    return [
        job.describe(f"{name} {{{name}}} has no effect: {reason}")
        for name, reason in reasons.items()
        if name in given
    ]
