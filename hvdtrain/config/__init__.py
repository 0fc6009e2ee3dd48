"""The configuration of a job: its fields and their rules. ``layers.py`` reads and merges sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from hvdtrain.config import values as kinds
from hvdtrain.config.yaml_reader import write_yaml
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.schedule import Cadence

_LEAST_STALL_TIMEOUT = 5

# the sources of values that were typed for one job
COMMAND_LINE = ("--set", "options")
# the learning rate of each built-in optimizer if no source sets one
LEARNING_RATES = {"sgd": 0.01, "adamw": 0.001, "lars": 0.1, "lamb": 0.001}


def _option(description: str, default: Any = ..., **rules: Any) -> Any:
    """Return a field of the config; without a default, it must be given."""
    return Field(default, description=description, **rules)


class Config(BaseModel):
    """All options of a job, validated. Instances are immutable.

    Sizes count samples unless the name says otherwise; an epoch is one pass over the training
    data. The descriptions are the help texts of the command line and the table in docs/config.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    # fmt: off
    framework: kinds.FrameworkField = _option("Framework to use: PyTorch or TensorFlow.")
    task: str = _option("Built-in task, or package.module:Task, or path/to/file.py:Task.", "digits")
    task_options: dict[str, Any] = _option("Keyword arguments of the task's constructor.", {})

    epochs: float | None = _option(
        "Number of epochs to train; 10 if neither epochs nor steps is given.", None, gt=0, le=10**9)
    steps: int | None = _option("Number of steps to train, in place of --epochs.", None, gt=0, le=10**12)
    max_time: kinds.TimeField | None = _option(
        "How long to train, such as 30m, 2h or 1d12h: then the run stops after a step with exit code 75, as "
        "after SIGTERM, and --resume continues it. A number is seconds.", None)
    batch_size: int = _option("Samples per worker and micro-batch.", 32, gt=0, le=10**9)
    global_batch_size: int | None = _option(
        "Samples per step over all workers, in place of --batch-size.", None, gt=0, le=10**9)
    accumulate: int = _option("Micro-batches per worker and step (gradient accumulation).", 1, gt=0, le=10**6)
    eval_batch_size: int | None = _option(
        "Samples per worker and evaluation batch; the training batch size if not "
        "given.", None, gt=0, le=10**9)

    learning_rate: float | None = _option(
        "Learning rate for a batch of base_batch_size samples; if not given, that of the task's own "
        "optimizer, or 0.01 for sgd, 0.1 for lars, 0.001 for adamw and lamb.", None, gt=0)
    lr_scaling: Literal["linear", "sqrt", "none"] = _option(
        "How the learning rate is scaled with the global batch size.", "linear")
    base_batch_size: int | None = _option(
        "Batch size that the learning rate refers to; if not given, one worker's samples per step, or the "
        "global batch size if --global-batch-size is given.", None, gt=0, le=10**9)
    lr_schedule: Literal[
        "constant", "cosine", "cosine_restarts", "linear", "inverse_sqrt", "one_cycle", "step", "cyclic",
        "plateau", "task"
    ] = _option(
        "Learning rate schedule after the warm-up; one_cycle has its own warm-up, plateau lowers the "
        "learning rate when an evaluation metric no longer improves, and task is learning_rate_factor of "
        "the task, the default of a task that has it.", "constant")
    warmup_epochs: float = _option("Length of the linear warm-up, in epochs.", 0.0, ge=0)
    warmup_steps: int | None = _option(
        "Length of the linear warm-up in steps, in place of --warmup-epochs.", None, ge=0)
    lr_final_fraction: float = _option(
        "Lowest learning rate of the cosine, cosine_restarts, linear, cyclic and plateau schedules, as a "
        "fraction of the peak.", 0.0, ge=0, le=1)
    lr_step_epochs: tuple[float, ...] = _option(
        "Epochs at which the step schedule lowers the learning rate.", ())
    lr_step_factor: float = _option(
        "Factor by which the step schedule multiplies the learning rate.", 0.1, gt=0)
    lr_cycle_epochs: float = _option(
        "Length of one cycle of cyclic and cosine_restarts, in epochs.", 2.0, gt=0)
    plateau_metric: kinds.MetricGoalField = _option(
        "Evaluation metric that the plateau schedule watches; written as for "
        "keep_best.", MetricGoal.parse("loss"))
    plateau_patience: int = _option(
        "Evaluations in a row without improvement after which the plateau schedule lowers the learning "
        "rate.", 2, gt=0)
    plateau_factor: float = _option(
        "Factor by which the plateau schedule multiplies the learning rate.", 0.1, gt=0, lt=1)

    optimizer: Literal["sgd", "adamw", "lars", "lamb"] = _option(
        "Optimizer: sgd and adamw follow PyTorch; lars and lamb are for large batches.", "sgd")
    momentum: float = _option("Momentum of sgd and lars.", 0.9, ge=0, lt=1)
    weight_decay: float = _option(
        "Weight decay: L2 for sgd and lars, decoupled for adamw and lamb.", 0.0, ge=0)
    decay_norms_and_biases: bool = _option(
        "Apply the weight decay also to biases and to the parameters of norms.", True)
    parameter_groups: tuple[kinds.ParameterGroup, ...] = _option(
        "Options of parameters by name, as a list of mappings with match, learning_rate_factor, "
        "weight_decay, frozen; the first pattern that matches counts.", ())
    adam_beta1: float = _option("First-moment decay of adamw and lamb.", 0.9, ge=0, lt=1)
    adam_beta2: float = _option("Second-moment decay of adamw and lamb.", 0.999, ge=0, lt=1)
    adam_epsilon: float = _option("Epsilon of adamw and lamb.", 1e-8, gt=0)
    clip_norm: float | None = _option("Clip the averaged gradient to this global norm.", None, gt=0)
    compression: kinds.CompressionField = _option(
        "Gradient compression for the all-reduce: none, fp16, bf16, or powersgd:RANK for matrices of low "
        "rank.", "none")
    overlap: kinds.OverlapField = _option(
        "Send gradients in parts while the backward pass computes others; auto: on a GPU, and between "
        "hosts.", "auto")
    shard: Literal["none", "optimizer", "gradients"] = _option(
        "What each worker keeps only its part of, to save memory: nothing, the state of the optimizer, or "
        "that and the gradients.", "none")
    stages: int = _option(
        "Split the model into this many stages of consecutive blocks, each on a worker of its own; needs "
        "MPI. Each such group of workers trains a replica of the model.", 1, ge=1, le=4096)
    stage_cuts: tuple[int, ...] | None = _option(
        "Where to cut the model: the index, from 0, of the block that starts each later stage. By "
        "default, stages have equal parts of the parameters.", None)
    sync_every: int | None = _option(
        "Local steps: number of steps that each worker trains on its own before the workers average their "
        "parameters; if not given, they average their gradients in every step.", None, gt=0, le=10**9)
    outer_optimizer: Literal["average", "nesterov"] = _option(
        "What follows local steps: the workers continue from the average of their parameters, or take a "
        "step of SGD with Nesterov momentum towards it (DiLoCo).", "average")
    outer_learning_rate: float = _option("Learning rate of the outer optimizer nesterov.", 0.7, gt=0)
    outer_momentum: float = _option("Momentum of the outer optimizer nesterov.", 0.9, ge=0, lt=1)
    label_smoothing: float = _option(
        "Label smoothing of the cross_entropy loss in training.", 0.0, ge=0, lt=1)
    mixup: float = _option("Alpha of mixup in training; 0 for none.", 0.0, ge=0, le=100)
    cutmix: float = _option(
        "Alpha of CutMix in training; with mixup, one of both for each sample.", 0.0, ge=0, le=100)
    ema_decay: float | None = _option(
        "Decay per step of a moving average of the weights, which is evaluated and "
        "exported.", None, gt=0, lt=1)
    early_stopping: kinds.MetricGoalField | None = _option(
        "Stop when this evaluation metric no longer improves; written as for keep_best.", None)
    early_stopping_patience: int = _option(
        "Evaluations in a row without improvement after which training stops.", 3, gt=0)

    precision: Literal["fp32", "bf16", "fp16"] = _option(
        "Precision of the computation; the weights stay in fp32.", "fp32")
    sync_batch_norm: bool = _option(
        "Compute batch norm statistics over the global batch, not per worker.", False)
    checkpoint_activations: bool = _option(
        "Recompute the activations of repeated blocks in the backward pass to save memory.", False)
    compile: bool = _option("Compile the model with torch.compile, or with XLA in TensorFlow.", False)

    device: Literal["auto", "cpu", "gpu"] = _option("Device to compute on.", "auto")
    threads: int | None = _option(
        "Compute threads per worker; its share of the host's cores if not given.", None, gt=0, le=4096)
    read_threads: int = _option("Threads per worker that prefetch samples.", 2, gt=0, le=1024)
    read_workers: int = _option(
        "Processes per worker that prefetch samples; with 0, threads do.", 0, ge=0, le=1024)
    on_bad_sample: Literal["error", "skip"] = _option(
        "What to do if a sample cannot be read: end with an error, or skip and count it.", "error")
    on_changed_data: Literal["stop", "warn"] = _option(
        "What to do if the data changed since the checkpoint: end with an error, or continue with a "
        "note.", "stop")
    seed: int = _option("Seed of all random numbers.", 0, ge=0, lt=2**63)
    initial_parameters: Literal["model", "portable"] = _option(
        "Initial values: those of the model, or values drawn by name, equal in both frameworks.", "model")

    run_dir: str | None = _option(
        "Run directory, or a URL such as s3://bucket/run; runs/TASK-FRAMEWORK-TIME if not given.", None)
    resume: str | None = _option(
        "Resume from a checkpoint: auto takes the newest good one in --run-dir, or starts from the beginning "
        "if there is none; PATH is the directory of a checkpoint or of a run, or its URL.", None)
    init: str | None = _option(
        "Checkpoint or run directory, or the URL of one, to load the weights from; training starts at step "
        "0.", None)
    init_only: kinds.Patterns = _option(
        "Patterns of portable names: of init's weights only those that match one are loaded; the rest keeps "
        "its initial values.", ())
    init_skip: kinds.Patterns = _option(
        "Patterns of portable names: of init's weights those that match one are not loaded.", ())
    save_every: kinds.EveryField | None = _option(
        "Interval between checkpoints, in addition to one at the end; null: only at the "
        "end.", Cadence(1.0, "epochs"))
    keep_last: int | None = _option("Number of newest checkpoints to keep; null: all.", 3, gt=0)
    keep_best: kinds.MetricGoalField | None = _option(
        "Evaluation metric whose best checkpoint is saved and kept too; NAME:min or NAME:max if the name "
        "does not tell whether lower or higher is better.", None)
    on_save_error: Literal["warn", "stop"] = _option(
        "What to do if a checkpoint cannot be written: warn and retry at the next save, or stop.", "warn")
    log_every: kinds.EveryField = _option("Interval between log entries.", Cadence(10))
    eval_every: kinds.EveryField | None = _option(
        "Interval between evaluations, in addition to one at the end; null: only at the "
        "end.", Cadence(1.0, "epochs"))
    check_replicas_every: int = _option("Steps between comparisons of the workers' parameters.", 1000, gt=0)
    stall_timeout: float = _option(
        "Seconds after which a worker that does not answer, or makes no progress while others wait, ends the "
        "job; 10 times as long for saves, evaluations and the like. 0: no limit.", 120, ge=0, le=604800)
    trace_indices: bool = _option("Write the indices that each worker trains on to RUN_DIR/indices/.", False)
    profile: kinds.StepsField | None = _option(
        "Steps to record on every worker, such as 20-24, for a trace and the largest costs in "
        "RUN_DIR/profile/.", None)

    track: kinds.TrackersField = _option(
        "Trackers that the run is sent to while it trains: mlflow, wandb, or tensorboard, which adds the "
        "config to the event file; several with commas.", ())
    track_checkpoints: bool = _option(
        "Send checkpoints to the trackers, too: the newest one, each time one was sent.", False)
    # fmt: on

    @field_validator("task", "run_dir", "resume", "init", mode="before")
    @classmethod
    def _expand(cls, value: object, info: Any) -> object:
        """Expand ``~`` and environment variables; ``task`` may name a file."""
        return kinds.expand_place(info.field_name, value)

    @field_validator("stall_timeout")
    @classmethod
    def _check_stall_timeout(cls, seconds: float) -> float:
        if 0 < seconds < _LEAST_STALL_TIMEOUT:
            least = f"{_LEAST_STALL_TIMEOUT}: workers tell what they do once a second"
            raise ValueError(f"should be 0, for no limit, or at least {least}")
        return seconds

    @field_validator("lr_step_epochs")
    @classmethod
    def _check_order(cls, epochs: tuple[float, ...]) -> tuple[float, ...]:
        if list(epochs) != sorted(epochs) or any(epoch < 0 for epoch in epochs):
            raise ValueError("should be in ascending order and not negative")
        return epochs

    @property
    def plateau_goal(self) -> MetricGoal | None:
        """The metric that the learning rate depends on; None if the schedule is another than plateau."""
        return self.plateau_metric if self.lr_schedule == "plateau" else None

    @property
    def base_learning_rate(self) -> float:
        """Learning rate for a batch of base_batch_size samples; the optimizer's default if none is set."""
        return LEARNING_RATES[self.optimizer] if self.learning_rate is None else self.learning_rate

    def to_yaml(self, replaced: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Return the configuration as YAML that repeats the run from its beginning in another directory."""
        displaced = {"batch_size"} if self.global_batch_size else set()
        displaced |= set() if self.warmup_steps is None else {"warmup_epochs"}
        # null values are written too: null is what resets a field that the task's defaults set
        fields = self.model_dump(exclude={"run_dir", "resume"} | displaced, mode="json")
        return write_yaml({**fields, **replaced})


def is_nullable(name: str) -> bool:
    """Return whether a field can be null."""
    return type(None) in get_args(Config.model_fields[name].annotation)


@dataclass(frozen=True)
class Layer:
    """Field values from one source."""

    source: str  # name of the source in messages, such as "--set" or "run.yaml"
    values: Mapping[str, Any]  # mapping of field names to values
    is_file: bool = False  # whether it is a config file, which may list all fields
