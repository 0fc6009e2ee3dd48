"""Names that users of other trainers type for config fields and parts of a task, and values they write."""

import difflib
import re
from collections.abc import Collection, Mapping

# by config field, what other trainers call it
_NAMES = {
    "accumulate": "accumulate_grad_batches grad_accum gradient_accumulation_steps",
    "adam_epsilon": "eps epsilon",
    "batch_size": "bs per_device_train_batch_size",
    "checkpoint_activations": "gradient_checkpointing",
    "clip_norm": "clip clip_grad grad_clip gradient_clip_val max_grad_norm max_norm",
    "early_stopping_patience": "patience",
    "ema_decay": "ema",
    "epochs": "max_epochs num_epochs num_train_epochs",
    "eval_batch_size": "per_device_eval_batch_size test_batch_size val_batch_size",
    "eval_every": "eval_interval eval_steps val_interval check_val_every_n_epoch",
    "keep_best": "save_top_k",
    "keep_last": "save_total_limit",
    "learning_rate": "lr",
    "log_every": "log_interval logging_steps",
    "lr_final_fraction": "min_lr",
    "lr_schedule": "lr_scheduler lr_scheduler_type scheduler",
    "precision": "amp bf16 dtype fp16 mixed_precision",
    "read_workers": "num_workers dataloader_num_workers",
    "resume": "ckpt ckpt_path resume_from resume_from_checkpoint",
    "run_dir": "log_dir output_dir save_dir",
    "save_every": "save_interval save_steps",
    "seed": "random_seed",
    "steps": "iterations max_iters max_steps num_steps",
    "sync_batch_norm": "sync_bn",
    "warmup_epochs": "warmup warmup_ratio",
    "weight_decay": "wd",
}
_SYNONYMS = {word: field for field, words in _NAMES.items() for word in words.split()}
# patterns of names that no field stands for, and what to do
_ADVICE = {
    r"np|n_?proc\w*|(num_|n_)?(gpus|nodes|devices|processes)|nnodes|world_size|workers|hosts|hostfile":
        "The launcher starts the workers: horovodrun -np 2 python -m hvdtrain ... (or mpirun -np 2 ...), one "
        "worker per GPU.",
    "log_?level|verbose|verbosity|quiet":
        "--debug shows the traceback of errors; log_every sets what is logged.",
    "lars_trust_coefficient": "It is 0.001; `hvdtrain docs numbers` has what replaces another one.",
    "rescale_epochs|check_data|stage_balance": "It has left; remove it.",
    "config|config_file": "Name the file without an option: python -m hvdtrain CONFIG.yaml ...",
    "data|data_dir|data_path|dataset|model|model_name|loss|metrics":
        "The task has the data, the model and the loss; its options are set by task_options.",
}  # fmt: skip
_OWN_LOSS = "here torch_loss(model, batch) or tf_loss(model, batch) returns the loss of each sample"
# patterns of members of classes of other trainers, and what a task has in their place
TASK_ADVICE = {
    "(training|train|forward)_step|compute_loss": _OWN_LOSS,
    "(val\\w*|test|eval\\w*)_step": f"evaluation computes loss and metrics; {_OWN_LOSS}",
    "predict_step": "torch_serve(model, batch) or tf_serve(model, batch) returns the outputs",
    "(configure|create|get)_(optimizer|scheduler)s?|(lr_)?(optimizers?|scheduler)":
        "torch_optimizer(parameters) or tf_optimizer() returns the optimizer; the config has lr_schedule",
    "(compute|configure)_metrics?|metrics?_fn":
        "metrics maps names to metrics: names, functions of (outputs, batch), SumMetric or GatheredMetric",
    "train(ing)?_(data|dataloaders?|loader|dataset|set|ds)":
        "train_data() returns the training data: samples, not batches",
    "(val\\w*|test|eval\\w*|dev)_(data|dataloaders?|loader|dataset|set|ds)":
        "eval_data() returns the evaluation data",
    "predict_dataloader": "predict_data() returns the data to predict",
    "(data_)?collat(e_fn|or)": "the methods are collate(samples) and train_collate(samples)",
    "loss_(fn|function)|criterion": "the attribute is loss: a name or a function of (outputs, batch)",
    "(train_)?sampler|sampl(e|ing)_weights?":
        "sample_probabilities() draws samples; class_weights and the key 'weights' weigh them",
    "((max|num)_)?epochs|(global_)?batch_size|lr|learning_rate|weight_decay|momentum|precision|lr_schedule":
        "options of the config are set by defaults, a mapping, or on the command line",
    r"on_\w+|should_stop|configure_callbacks":
        "callbacks is a list of objects with methods of hvdtrain.Callback",
}  # fmt: skip
_VALUES = {
    ("optimizer", "adam"): "adamw with weight_decay 0 is Adam",
    ("precision", "float32"): "write fp32",
    ("precision", "float16"): "write fp16",
    ("precision", "bfloat16"): "write bf16",
    ("device", "cuda"): "write gpu",
    ("framework", "pytorch"): "write torch",
    ("framework", "tensorflow"): "write tf",
    ("framework", "keras"): "write tf",
}
# by field, what to do for a value that there is not
_OTHER_VALUES = {
    "optimizer": "the task can return any other one in torch_optimizer(parameters) or tf_optimizer()"
}


def _normalized(name: object) -> str:
    return str(name).strip().lower().lstrip("-").replace("-", "_")


def advice_for(name: object, table: Mapping[str, str] = _ADVICE) -> str:
    """Return what to do about a name of other trainers, with underscores or dashes; empty if unknown."""
    return next((text for pattern, text in table.items() if re.fullmatch(pattern, _normalized(name))), "")


def meant_field(name: object, known: Collection[str]) -> str | None:
    """Return the field that a name stands for: itself, a synonym or the closest; None if none is close."""
    plain = _normalized(name)
    plain = _SYNONYMS.get(plain, plain)
    close = [plain] if plain in known else difflib.get_close_matches(plain, known, n=1)
    return close[0] if close else None


def value_hint(field: str, value: object, nullable: bool) -> str:
    """Return what to write in place of a value that a field does not take; empty if unknown."""
    if field == "resume" and isinstance(value, bool):
        return 'write resume="auto" for the newest checkpoint in run_dir'
    if not isinstance(value, str):
        return ""
    if nullable and value.strip().lower() in ("none", "nil", "null", ""):
        return "write null for no value"
    return _VALUES.get((field, value.strip().lower()), _OTHER_VALUES.get(field, ""))
