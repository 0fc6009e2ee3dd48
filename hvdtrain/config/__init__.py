"""The configuration of a job: its fields and their rules. ``layers.py`` reads and merges sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from hvdtrain.config.values import (
    CompressionField,
    EveryField,
    FrameworkField,
    MetricGoalField,
    OverlapField,
    ParameterGroup,
    Patterns,
    StepsField,
    TrackersField,
    expand_place,
)
from hvdtrain.config.yaml_reader import write_yaml
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.schedule import Cadence

_LEAST_STALL_TIMEOUT = 5

# the sources of values that were typed for one job
COMMAND_LINE = ("--set", "options")
# the learning rate of each built-in optimizer if no source sets one
LEARNING_RATES = {"sgd": 0.01, "adamw": 0.001, "lars": 0.1, "lamb": 0.001}


class Config(BaseModel):
    """All options of a job, validated. Instances are immutable.

    Sizes count samples unless the name says otherwise; an epoch is one pass over the training
    data. The descriptions are the help texts of the command line and the table in docs/config.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    framework: FrameworkField = Field(description="Framework to use: PyTorch or TensorFlow.")
    task: str = Field("digits", description="Built-in task, or package.module:Task, or path/to/file.py:Task.")
    task_options: dict[str, Any] = Field({}, description="Keyword arguments of the task's constructor.")

    epochs: float | None = Field(
        None,
        gt=0,
        le=10**9,
        description="Number of epochs to train; 10 if neither epochs nor steps is given.",
    )
    steps: int | None = Field(
        None, gt=0, le=10**12, description="Number of steps to train, in place of --epochs."
    )
    batch_size: int = Field(32, gt=0, le=10**9, description="Samples per worker and micro-batch.")
    global_batch_size: int | None = Field(
        None, gt=0, le=10**9, description="Samples per step over all workers, in place of --batch-size."
    )
    accumulate: int = Field(
        1, gt=0, le=10**6, description="Micro-batches per worker and step (gradient accumulation)."
    )
    eval_batch_size: int | None = Field(
        None,
        gt=0,
        le=10**9,
        description="Samples per worker and evaluation batch; the training batch size if not given.",
    )

    learning_rate: float | None = Field(
        None,
        gt=0,
        description="Learning rate for a batch of base_batch_size samples; if not given, that of the task's "
        "own optimizer, or 0.01 for sgd, 0.1 for lars, 0.001 for adamw and lamb.",
    )
    lr_scaling: Literal["linear", "sqrt", "none"] = Field(
        "linear", description="How the learning rate is scaled with the global batch size."
    )
    base_batch_size: int | None = Field(
        None,
        gt=0,
        le=10**9,
        description="Batch size that the learning rate refers to; if not given, one worker's samples per "
        "step, or the global batch size if --global-batch-size is given.",
    )
    rescale_epochs: float = Field(
        0.0,
        ge=0,
        description="Epochs in which the peak of the learning rate moves to its new value when the number of "
        "workers changes and the global batch with it; 0 for at once.",
    )
    lr_schedule: Literal["constant", "cosine", "linear", "one_cycle", "step", "cyclic", "plateau"] = Field(
        "constant",
        description="Learning rate schedule after the warm-up; one_cycle has its own warm-up, and plateau "
        "lowers the learning rate when an evaluation metric no longer improves.",
    )
    warmup_epochs: float = Field(0.0, ge=0, description="Length of the linear warm-up, in epochs.")
    warmup_steps: int | None = Field(
        None, ge=0, description="Length of the linear warm-up in steps, in place of --warmup-epochs."
    )
    lr_final_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Lowest learning rate of the cosine, linear, cyclic and plateau schedules, as a fraction "
        "of the peak.",
    )
    lr_step_epochs: tuple[float, ...] = Field(
        (), description="Epochs at which the step schedule lowers the learning rate."
    )
    lr_step_factor: float = Field(
        0.1, gt=0, description="Factor by which the step schedule multiplies the learning rate."
    )
    lr_cycle_epochs: float = Field(
        2.0, gt=0, description="Length of one cycle of the cyclic schedule, in epochs."
    )
    plateau_metric: MetricGoalField = Field(
        MetricGoal.parse("loss"),
        description="Evaluation metric that the plateau schedule watches; written as for keep_best.",
    )
    plateau_patience: int = Field(
        2,
        gt=0,
        description="Evaluations in a row without improvement after which the plateau schedule lowers the "
        "learning rate.",
    )
    plateau_factor: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Factor by which the plateau schedule multiplies the learning rate.",
    )

    optimizer: Literal["sgd", "adamw", "lars", "lamb"] = Field(
        "sgd", description="Optimizer: sgd and adamw follow PyTorch; lars and lamb are for large batches."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of sgd and lars.")
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay: L2 for sgd and lars, decoupled for adamw and lamb."
    )
    decay_norms_and_biases: bool = Field(
        True, description="Apply the weight decay also to biases and to the parameters of norms."
    )
    parameter_groups: tuple[ParameterGroup, ...] = Field(
        (),
        description="Options of parameters by name, as a list of mappings with match, learning_rate_factor, "
        "weight_decay, frozen; the first pattern that matches counts.",
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="First-moment decay of adamw and lamb.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Second-moment decay of adamw and lamb.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Epsilon of adamw and lamb.")
    clip_norm: float | None = Field(None, gt=0, description="Clip the averaged gradient to this global norm.")
    compression: CompressionField = Field(
        "none",
        description="Gradient compression for the all-reduce: none, fp16, bf16, or powersgd:RANK for "
        "matrices of low rank.",
    )
    overlap: OverlapField = Field(
        "auto",
        description="Send gradients in parts while the backward pass computes others; auto: on a GPU, and "
        "between hosts.",
    )
    shard: Literal["none", "optimizer", "gradients"] = Field(
        "none",
        description="What each worker keeps only its part of, to save memory: nothing, the state of the "
        "optimizer, or that and the gradients.",
    )
    stages: int = Field(
        1,
        ge=1,
        le=4096,
        description="Split the model into this many stages of consecutive blocks, each on a worker of its "
        "own; needs MPI. Each such group of workers trains a replica of the model.",
    )
    stage_balance: Literal["time", "memory"] = Field(
        "time",
        description="What the stages of a split model have equal parts of: the measured time of a step, or "
        "the memory of the parameters.",
    )
    stage_cuts: tuple[int, ...] | None = Field(
        None,
        description="The first block of each stage but the first, blocks being counted from 0; if not given, "
        "those of the checkpoint that is resumed, and in a new run stage_balance decides.",
    )
    sync_every: int | None = Field(
        None,
        gt=0,
        le=10**9,
        description="Local steps: number of steps that each worker trains on its own before the workers "
        "average their parameters; if not given, they average their gradients in every step.",
    )
    outer_optimizer: Literal["average", "nesterov"] = Field(
        "average",
        description="What follows local steps: the workers go on from the average of their parameters, "
        "or take a step of SGD with Nesterov momentum towards it (DiLoCo).",
    )
    outer_learning_rate: float = Field(
        0.7, gt=0, description="Learning rate of the outer optimizer nesterov."
    )
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of the outer optimizer nesterov.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Label smoothing of the cross_entropy loss in training."
    )
    mixup: float = Field(0.0, ge=0, le=100, description="Alpha of mixup in training; 0 for none.")
    cutmix: float = Field(
        0.0, ge=0, le=100, description="Alpha of CutMix in training; with mixup, one of both for each sample."
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay per step of a moving average of the weights, which is evaluated and exported.",
    )
    early_stopping: MetricGoalField | None = Field(
        None, description="Stop when this evaluation metric no longer improves; written as for keep_best."
    )
    early_stopping_patience: int = Field(
        3, gt=0, description="Evaluations in a row without improvement after which training stops."
    )

    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Precision of the computation; the weights stay in fp32."
    )
    sync_batch_norm: bool = Field(
        False, description="Compute batch norm statistics over the global batch, not per worker."
    )
    checkpoint_activations: bool = Field(
        False, description="Recompute the activations of repeated blocks in the backward pass to save memory."
    )
    compile: bool = Field(
        False, description="Compile the model with torch.compile, or with XLA in TensorFlow."
    )

    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="Device to compute on.")
    threads: int | None = Field(
        None,
        gt=0,
        le=4096,
        description="Compute threads per worker; its share of the host's cores if not given.",
    )
    read_threads: int = Field(2, gt=0, le=1024, description="Threads per worker that prefetch samples.")
    read_workers: int = Field(
        0, ge=0, le=1024, description="Processes per worker that prefetch samples; with 0, threads do."
    )
    on_bad_sample: Literal["error", "skip"] = Field(
        "error", description="What to do if a sample cannot be read: end with an error, or skip and count it."
    )
    check_data: int = Field(
        0,
        ge=0,
        description="Number of batches whose samples are compared between workers, and read twice, before "
        "training.",
    )
    on_changed_data: Literal["stop", "warn"] = Field(
        "stop",
        description="What to do if the data changed since the checkpoint: end with an error, or continue "
        "with a note.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of all random numbers.")
    initial_parameters: Literal["model", "portable"] = Field(
        "model",
        description="Initial values: those of the model, or values drawn by name, equal in both frameworks.",
    )

    run_dir: str | None = Field(
        None,
        description="Run directory, or a URL such as s3://bucket/run; runs/TASK-FRAMEWORK-TIME if not given.",
    )
    resume: str | None = Field(
        None,
        description="Resume from a checkpoint: auto takes the newest good one in --run-dir, or starts "
        "from the beginning if there is none; PATH is the directory of a checkpoint or of a run, or its URL.",
    )
    init: str | None = Field(
        None,
        description="Checkpoint or run directory, or the URL of one, to load the weights from; training "
        "starts at step 0.",
    )
    init_only: Patterns = Field(
        (),
        description="Patterns of portable names: of init's weights only those that match one are loaded; the "
        "rest keeps its initial values.",
    )
    init_skip: Patterns = Field(
        (),
        description="Patterns of portable names: of init's weights those that match one are not loaded.",
    )
    save_every: EveryField | None = Field(
        Cadence(1.0, "epochs"),
        description="Interval between checkpoints, in addition to one at the end; null: only at the end.",
    )
    keep_last: int | None = Field(3, gt=0, description="Number of newest checkpoints to keep; null: all.")
    keep_best: MetricGoalField | None = Field(
        None,
        description="Evaluation metric whose best checkpoint is saved and kept too; NAME:min or NAME:max "
        "if the name does not tell whether lower or higher is better.",
    )
    on_save_error: Literal["warn", "stop"] = Field(
        "warn",
        description="What to do if a checkpoint cannot be written: warn and retry at the next save, or stop.",
    )
    log_every: EveryField = Field(Cadence(10), description="Interval between log entries.")
    eval_every: EveryField | None = Field(
        Cadence(1.0, "epochs"),
        description="Interval between evaluations, in addition to one at the end; null: only at the end.",
    )
    check_replicas_every: int = Field(
        1000, gt=0, description="Steps between comparisons of the workers' parameters."
    )
    stall_timeout: float = Field(
        120,
        ge=0,
        le=604800,
        description="Seconds after which a worker that does not answer, or makes no progress while others "
        "wait, ends the job; 10 times as long for saves, evaluations and the like. 0: no limit.",
    )
    trace_indices: bool = Field(
        False, description="Write the indices that each worker trains on to RUN_DIR/indices/."
    )
    profile: StepsField | None = Field(
        None,
        description="Steps to record on every worker, such as 20-24, for a trace and the largest costs in "
        "RUN_DIR/profile/.",
    )

    track: TrackersField = Field(
        (),
        description="Trackers that the run is sent to while it trains: mlflow, wandb, or tensorboard, which "
        "adds the config to the event file; several with commas.",
    )
    track_checkpoints: bool = Field(
        False, description="Send checkpoints to the trackers, too: the newest one, each time one was sent."
    )

    @field_validator("task", "run_dir", "resume", "init", mode="before")
    @classmethod
    def _expand(cls, value: object, info: Any) -> object:
        """Expand ``~`` and environment variables; ``task`` may name a file."""
        return expand_place(info.field_name, value)

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
        """Return the configuration as YAML that repeats the run from its beginning in another directory.

        Args:
            replaced: fields that are written otherwise, such as absolute paths.
        """
        displaced = {"batch_size"} if self.global_batch_size else set()
        displaced |= set() if self.warmup_steps is None else {"warmup_epochs"}
        # null values are written too: null is what resets a field that the task's defaults set
        values = self.model_dump(exclude={"run_dir", "resume"} | displaced, mode="json")
        return write_yaml({**values, **replaced})


def is_nullable(name: str) -> bool:
    """Return whether a field can be null."""
    return type(None) in get_args(Config.model_fields[name].annotation)


@dataclass(frozen=True)
class Layer:
    """Field values from one source.

    Args:
        source: name of the source in messages, such as "--set" or "run.yaml".
        values: mapping of field names to values.
        is_file: whether it is a config file, which may list all fields.
    """

    source: str
    values: Mapping[str, Any]
    is_file: bool = False
