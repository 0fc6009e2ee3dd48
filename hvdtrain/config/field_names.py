"""Names that users of other trainers type for config fields and parts of a task, and values they write."""

import difflib
import re
from collections.abc import Collection

# words of other trainers: the config field that does this
SYNONYMS = {
    "accumulate_grad_batches": "accumulate",
    "accumulation_steps": "accumulate",
    "grad_accum": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "amp": "precision",
    "bf16": "precision",
    "dtype": "precision",
    "fp16": "precision",
    "half": "precision",
    "mixed_precision": "precision",
    "batch": "batch_size",
    "bs": "batch_size",
    "bsz": "batch_size",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "test_batch_size": "eval_batch_size",
    "val_batch_size": "eval_batch_size",
    "total_batch_size": "global_batch_size",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "epsilon": "adam_epsilon",
    "clip": "clip_norm",
    "clip_grad": "clip_norm",
    "clipnorm": "clip_norm",
    "grad_clip": "clip_norm",
    "gradient_clip_val": "clip_norm",
    "max_grad_norm": "clip_norm",
    "max_norm": "clip_norm",
    "ema": "ema_decay",
    "epoch": "epochs",
    "max_epochs": "epochs",
    "n_epochs": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "backend": "framework",
    "accelerator": "device",
    "gpu": "device",
    "iterations": "steps",
    "max_iters": "steps",
    "max_steps": "steps",
    "num_steps": "steps",
    "lr": "learning_rate",
    "lrate": "learning_rate",
    "lr_scheduler": "lr_schedule",
    "lr_scheduler_type": "lr_schedule",
    "schedule": "lr_schedule",
    "scheduler": "lr_schedule",
    "sched": "lr_schedule",
    "warmup": "warmup_epochs",
    "warmup_ratio": "warmup_epochs",
    "log_interval": "log_every",
    "logging_steps": "log_every",
    "eval_interval": "eval_every",
    "eval_steps": "eval_every",
    "val_interval": "eval_every",
    "check_val_every_n_epoch": "eval_every",
    "save_interval": "save_every",
    "save_steps": "save_every",
    "checkpoint_every": "save_every",
    "save_total_limit": "keep_last",
    "save_top_k": "keep_best",
    "n_workers": "read_workers",
    "num_workers": "read_workers",
    "dataloader_num_workers": "read_workers",
    "factor": "plateau_factor",
    "min_lr": "lr_final_fraction",
    "opt": "optimizer",
    "optim": "optimizer",
    "patience": "early_stopping_patience",
    "ckpt": "resume",
    "ckpt_path": "resume",
    "resume_from": "resume",
    "resume_from_checkpoint": "resume",
    "random_seed": "seed",
    "rng_seed": "seed",
    "smoothing": "label_smoothing",
    "sync_bn": "sync_batch_norm",
    "gradient_checkpointing": "checkpoint_activations",
    "torch_compile": "compile",
    "default_root_dir": "run_dir",
    "log_dir": "run_dir",
    "logdir": "run_dir",
    "out_dir": "run_dir",
    "output_dir": "run_dir",
    "save_dir": "run_dir",
    "wd": "weight_decay",
}
_LAUNCHER = (
    "The launcher starts the workers: horovodrun -np 2 python -m hvdtrain ... (or mpirun -np 2 ...), "
    "one worker per GPU."
)
# words for what is no field: what to do
_ADVICE = {
    **dict.fromkeys(
        ("np", "nproc", "n_proc", "nprocs", "num_proc", "num_processes", "nproc_per_node", "gpus", "n_gpus",
         "num_gpus", "devices", "world_size", "workers", "nodes", "num_nodes", "nnodes", "hosts", "hostfile"),
        _LAUNCHER,
    ),
    **dict.fromkeys(
        ("log_level", "loglevel", "logging_level", "verbose", "verbosity", "quiet"),
        "There are no log levels: --debug shows the traceback of errors, log_every sets how often is logged.",
    ),
    "betas": "Set adam_beta1 and adam_beta2.",
    "config": "Name the file without an option: python -m hvdtrain CONFIG.yaml ...",
    "config_file": "Name the file without an option: python -m hvdtrain CONFIG.yaml ...",
    **dict.fromkeys(
        ("data", "data_dir", "data_path", "dataset", "model", "model_name", "loss", "metrics", "hidden"),
        "The task has the data, the model and the loss; its options are set by task_options.",
    ),
}  # fmt: skip
_EVAL_DATA = "eval_data() returns the evaluation data, of several sets hvdtrain.EvalSets"
_OWN_LOSS = "here torch_loss(model, batch) or tf_loss(model, batch) returns the loss of each sample"
_LOADERS = ("data", "dataloader", "dataloaders", "loader", "dataset", "set", "ds")
# members of classes of other trainers: what a task has in their place
_TASK_ADVICE = {
    **dict.fromkeys(("training_step", "train_step", "compute_loss", "forward_step"), _OWN_LOSS),
    **dict.fromkeys(
        ("validation_step", "test_step", "eval_step", "evaluation_step"),
        f"evaluation computes loss and metrics; {_OWN_LOSS} and {{metric: value of each sample}}",
    ),
    "predict_step": "torch_serve(model, batch) or tf_serve(model, batch) returns the outputs",
    **dict.fromkeys(
        ("configure_optimizers", "configure_optimizer", "create_optimizer", "get_optimizer", "optimizer",
         "optimizers", "scheduler", "lr_scheduler", "create_scheduler", "configure_schedulers"),
        "torch_optimizer(parameters) or tf_optimizer() returns the optimizer; the config has lr_schedule",
    ),
    **dict.fromkeys(
        ("compute_metrics", "compute_metric", "configure_metrics", "metrics_fn", "metric_fn"),
        "metrics maps names to metrics: names, functions of (outputs, batch), SumMetric or GatheredMetric",
    ),
    **{f"{split}_{kind}": "train_data() returns the training data: samples, not batches"
       for split in ("train", "training") for kind in _LOADERS},
    **{f"{split}_{kind}": _EVAL_DATA
       for split in ("val", "valid", "validation", "eval", "test", "dev") for kind in _LOADERS},
    "predict_dataloader": "predict_data() returns the data to predict",
    "prepare_data": "the task's constructor or train_data() prepares data",
    **dict.fromkeys(
        ("collate_fn", "data_collator", "batch_collate"),
        "the methods are collate(samples) and train_collate(samples)",
    ),
    **dict.fromkeys(
        ("loss_fn", "loss_function", "criterion", "objective"),
        "the attribute is loss: a name or a function of (outputs, batch)",
    ),
    **dict.fromkeys(
        ("sampler", "train_sampler", "sample_weights", "sampling_weights", "sample_weight"),
        "sample_probabilities() draws samples; class_weights and the key 'weights' weigh them",
    ),
    **dict.fromkeys(
        ("epochs", "max_epochs", "num_epochs", "batch_size", "global_batch_size", "lr", "learning_rate",
         "weight_decay", "momentum", "label_smoothing", "precision", "lr_schedule", "warmup_epochs"),
        "options of the config are set by defaults, a mapping, or on the command line",
    ),
}  # fmt: skip
_HOOK = re.compile(
    r"on_(step|window|evaluation|checkpoint|start|end|workers_changed|fit_\w+)"
    r"|on_((before|after)_)?(train|training|validation|val|eval|test|predict|evaluate|save|log|load|epoch|batch|"
    r"step|optimizer|backward|zero_grad|sanity|exception|init)(_\w+)?|should_stop|configure_callbacks"
)
_VALUES = {
    ("lr_schedule", "reducelronplateau"): "write plateau",
    ("lr_schedule", "reduce_lr_on_plateau"): "write plateau",
    ("optimizer", "adam"): "adamw with weight_decay 0 is Adam",
    ("precision", "float32"): "write fp32",
    ("precision", "float16"): "write fp16",
    ("precision", "bfloat16"): "write bf16",
    ("device", "cuda"): "write gpu",
    ("framework", "pytorch"): "write torch",
    ("framework", "tensorflow"): "write tf",
    ("framework", "keras"): "write tf",
}  # fmt: skip
# by field, what to do for a value that there is not
_OTHER_VALUES = {
    "optimizer": "the task can return any other one in torch_optimizer(parameters) or tf_optimizer()",
}
_NULLS = ("none", "nil", "null", "")


def task_advice(name: str) -> str:
    """Return what a task has in place of a member of other trainers' classes; empty for any other name."""
    plain = name.lower()
    is_hook = _HOOK.fullmatch(plain) is not None
    return (
        "callbacks is a list of objects with methods of hvdtrain.Callback"
        if is_hook
        else (_TASK_ADVICE.get(plain, ""))
    )


def is_misspelt(name: str, known: str) -> bool:
    """Return whether a name is close to a known one: one letter, or a third of the letters of each word."""
    words, others = name.lower().split("_"), known.split("_")
    if _distance("".join(words), "".join(others)) <= 1:
        return True
    return len(words) == len(others) and all(
        _distance(one, other) <= min(2, len(other) // 3) for one, other in zip(words, others, strict=True)
    )


def _distance(one: str, other: str) -> int:
    """Return how many letters must be put in, left out, replaced or exchanged to turn one into the other."""
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one):
        row = [i + 1]
        for j, wanted in enumerate(other):
            cost = min(rows[i][j + 1] + 1, row[j] + 1, rows[i][j] + (letter != wanted))
            if i and j and letter == other[j - 1] and wanted == one[i - 1]:
                cost = min(cost, rows[i - 1][j - 1] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


def _normalized(name: object) -> str:
    return str(name).strip().lower().lstrip("-").replace("-", "_")


def advice_for(name: object) -> str:
    """Return what to do if a name, with underscores or dashes, is that of no field; empty if unknown."""
    return _ADVICE.get(_normalized(name), "")


def meant_field(name: object, known: Collection[str]) -> str | None:
    """Return the field that a name stands for: itself, a synonym or the closest; None if none is close.

    Args:
        name: what the user wrote, with underscores or dashes.
        known: names of the fields.
    """
    plain = _normalized(name)
    plain = SYNONYMS.get(plain, plain)
    close = [plain] if plain in known else difflib.get_close_matches(plain, known, n=1)
    return close[0] if close else None


def name_hint(name: object, known: Collection[str]) -> str:
    """Return what to write in place of a name that is no field, as a sentence; empty if nothing is close."""
    meant = meant_field(name, known)
    return advice_for(name) or (f"Did you mean {meant!r}?" if meant else "")


def value_hint(field: str, value: object, nullable: bool) -> str:
    """Return what to write in place of a value that a field does not take; empty if unknown.

    Args:
        field: name of the field.
        value: what the user wrote.
        nullable: whether the field can be null.
    """
    if field == "resume" and isinstance(value, bool):
        return 'write resume="auto" for the newest checkpoint in run_dir'
    if not isinstance(value, str):
        return ""
    if nullable and value.strip().lower() in _NULLS:
        return "write null for no value"
    return _VALUES.get((field, value.strip().lower()), _OTHER_VALUES.get(field, ""))
