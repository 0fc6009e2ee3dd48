"""The fields of a job as typed keyword arguments, which editors complete and type checkers check."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class TrainOptions(TypedDict, total=False):
    """What ``hvdtrain.train`` takes by name. ``Config`` says what each means, and checks it."""

    task_options: Mapping[str, Any]
    epochs: float | None
    steps: int | None
    max_time: float | str | None
    batch_size: int
    global_batch_size: int | None
    accumulate: int
    eval_batch_size: int | None
    learning_rate: float | None
    lr_scaling: Literal["linear", "sqrt", "none"]
    base_batch_size: int | None
    # fmt: off
    lr_schedule: Literal["constant", "cosine", "cosine_restarts", "linear", "inverse_sqrt", "one_cycle",
                         "step", "cyclic", "plateau", "task"]
    # fmt: on
    warmup_epochs: float
    warmup_steps: int | None
    lr_final_fraction: float
    lr_step_epochs: Sequence[float]
    lr_step_factor: float
    lr_cycle_epochs: float
    plateau_metric: str
    plateau_patience: int
    plateau_factor: float
    optimizer: Literal["sgd", "adamw", "lars", "lamb"]
    momentum: float
    weight_decay: float
    decay_norms_and_biases: bool
    parameter_groups: Sequence[Mapping[str, Any]]
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    clip_norm: float | None
    compression: str
    overlap: Literal["auto", "true", "false"] | bool
    shard: Literal["none", "optimizer", "gradients"]
    stages: int
    stage_cuts: Sequence[int] | None
    sync_every: int | None
    outer_optimizer: Literal["average", "nesterov"]
    outer_learning_rate: float
    outer_momentum: float
    label_smoothing: float
    mixup: float
    cutmix: float
    ema_decay: float | None
    early_stopping: str | None
    early_stopping_patience: int
    precision: Literal["fp32", "bf16", "fp16"]
    sync_batch_norm: bool
    checkpoint_activations: bool
    compile: bool
    device: Literal["auto", "cpu", "gpu"]
    threads: int | None
    read_threads: int
    read_workers: int
    on_bad_sample: Literal["error", "skip"]
    on_changed_data: Literal["stop", "warn"]
    seed: int
    initial_parameters: Literal["model", "portable"]
    run_dir: str | Path | None
    resume: str | Path | None
    init: str | Path | None
    init_only: str | Sequence[str]
    init_skip: str | Sequence[str]
    save_every: int | str | None
    keep_last: int | None
    keep_best: str | None
    on_save_error: Literal["warn", "stop"]
    log_every: int | str
    eval_every: int | str | None
    check_replicas_every: int
    stall_timeout: float
    trace_indices: bool
    profile: int | str | None
    track: str | Sequence[str]
    track_checkpoints: bool
