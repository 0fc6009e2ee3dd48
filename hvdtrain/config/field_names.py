"""Names that users of other trainers type for config fields and parts of a task, and values they write."""

import difflib
import re
from collections.abc import Collection, Mapping

# by config field, what other trainers call it
_NAMES = {
    "accumulate": "accumulate_grad_batches accumulation_steps grad_accum gradient_accumulation_steps",
    "precision": "amp bf16 dtype fp16 half mixed_precision",
    "batch_size": "batch bs bsz train_batch_size per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size test_batch_size val_batch_size",
    "global_batch_size": "total_batch_size",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps epsilon",
    "clip_norm": "clip clip_grad clipnorm grad_clip gradient_clip_val max_grad_norm max_norm",
    "ema_decay": "ema",
    "epochs": "epoch max_epochs n_epochs num_epochs num_train_epochs",
    "framework": "backend",
    "device": "accelerator gpu",
    "steps": "iterations max_iters max_steps num_steps",
    "learning_rate": "lr lrate",
    "lr_schedule": "lr_scheduler lr_scheduler_type schedule scheduler sched",
    "warmup_epochs": "warmup warmup_ratio",
    "log_every": "log_interval logging_steps",
    "eval_every": "eval_interval eval_steps val_interval check_val_every_n_epoch",
    "save_every": "save_interval save_steps checkpoint_every",
    "keep_last": "save_total_limit",
    "keep_best": "save_top_k",
    "read_workers": "n_workers num_workers dataloader_num_workers",
    "plateau_factor": "factor",
    "lr_final_fraction": "min_lr",
    "optimizer": "opt optim",
    "early_stopping_patience": "patience",
    "resume": "ckpt ckpt_path resume_from resume_from_checkpoint",
    "seed": "random_seed rng_seed",
    "label_smoothing": "smoothing",
    "sync_batch_norm": "sync_bn",
    "checkpoint_activations": "gradient_checkpointing",
    "compile": "torch_compile",
    "run_dir": "default_root_dir log_dir logdir out_dir output_dir save_dir",
    "weight_decay": "wd",
}  # fmt: skip
# words of other trainers: the config field that does this
SYNONYMS = {word: field for field, words in _NAMES.items() for word in words.split()}
# words for what is no field, by what to do
_ADVICE = {
    "The launcher starts the workers: horovodrun -np 2 python -m hvdtrain ... (or mpirun -np 2 ...), one "
    "worker per GPU.":
        "np nproc n_proc nprocs num_proc num_processes nproc_per_node gpus n_gpus num_gpus devices "
        "world_size workers nodes num_nodes nnodes hosts hostfile",
    "There are no log levels: --debug shows the traceback of errors, log_every sets how often is logged.":
        "log_level loglevel logging_level verbose verbosity quiet",
    "It is 0.001; `hvdtrain docs numbers` has what replaces another one.": "lars_trust_coefficient",
    "It has left; remove it.": "rescale_epochs check_data stage_balance",
    "Set adam_beta1 and adam_beta2.": "betas",
    "Name the file without an option: python -m hvdtrain CONFIG.yaml ...": "config config_file",
    "The task has the data, the model and the loss; its options are set by task_options.":
        "data data_dir data_path dataset model model_name loss metrics hidden",
}  # fmt: skip
_OWN_LOSS = "here torch_loss(model, batch) or tf_loss(model, batch) returns the loss of each sample"
_LOADERS = ["_data", "_dataloader", "_dataloaders", "_loader", "_dataset", "_set", "_ds"]
# members of classes of other trainers, by what a task has in their place
_TASK_ADVICE = {
    _OWN_LOSS: "training_step train_step compute_loss forward_step",
    f"evaluation computes loss and metrics; {_OWN_LOSS} and {{metric: value of each sample}}":
        "validation_step test_step eval_step evaluation_step",
    "torch_serve(model, batch) or tf_serve(model, batch) returns the outputs": "predict_step",
    "torch_optimizer(parameters) or tf_optimizer() returns the optimizer; the config has lr_schedule, "
    "and the task may have learning_rate_factor(progress)":
        "configure_optimizers configure_optimizer create_optimizer get_optimizer optimizer optimizers "
        "scheduler lr_scheduler create_scheduler configure_schedulers",
    "metrics maps names to metrics: names, functions of (outputs, batch), SumMetric or GatheredMetric":
        "compute_metrics compute_metric configure_metrics metrics_fn metric_fn",
    "train_data() returns the training data: samples, not batches":
        " ".join(f"{split}{kind}" for split in ("train", "training") for kind in _LOADERS),
    "eval_data() returns the evaluation data, of several sets hvdtrain.EvalSets":
        " ".join(f"{split}{kind}" for split in ("val", "valid", "validation", "eval", "test", "dev")
                 for kind in _LOADERS),
    "predict_data() returns the data to predict": "predict_dataloader",
    "the task's constructor or train_data() prepares data": "prepare_data",
    "the methods are collate(samples) and train_collate(samples)": "collate_fn data_collator batch_collate",
    "the attribute is loss: a name or a function of (outputs, batch)":
        "loss_fn loss_function criterion objective",
    "sample_probabilities() draws samples; class_weights and the key 'weights' weigh them":
        "sampler train_sampler sample_weights sampling_weights sample_weight",
    "options of the config are set by defaults, a mapping, or on the command line":
        "epochs max_epochs num_epochs batch_size global_batch_size lr learning_rate weight_decay momentum "
        "label_smoothing precision lr_schedule warmup_epochs",
}  # fmt: skip
_HOOK = re.compile(
    r"on_(step|window|evaluation|checkpoint|start|end|workers_changed|fit_\w+)"
    r"|on_((before|after)_)?(train|training|validation|val|eval|test|predict|evaluate|save|log|load|epoch|batch|"
    r"step|optimizer|backward|zero_grad|sanity|exception|init)(_\w+)?|should_stop|configure_callbacks"
)
_VALUES = {
    ("lr_schedule", "cosine_with_restarts"): "write cosine_restarts",
    ("lr_schedule", "cosineannealingwarmrestarts"): "write cosine_restarts",
    ("lr_schedule", "lambdalr"): "give the task learning_rate_factor(progress)",
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
    "optimizer": "the task can return any other one in torch_optimizer(parameters) or tf_optimizer()"
}
_NULLS = ("none", "nil", "null", "")


def task_advice(name: str) -> str:
    """Return what a task has in place of a member of other trainers' classes; empty for any other name."""
    if _HOOK.fullmatch(name.lower()):
        return "callbacks is a list of objects with methods of hvdtrain.Callback"
    return _advice(_TASK_ADVICE, name.lower())


def _advice(table: Mapping[str, str], word: str) -> str:
    return next((text for text, words in table.items() if word in words.split()), "")


def _normalized(name: object) -> str:
    return str(name).strip().lower().lstrip("-").replace("-", "_")


def advice_for(name: object) -> str:
    """Return what to do if a name, with underscores or dashes, is that of no field; empty if unknown."""
    return _advice(_ADVICE, _normalized(name))


def meant_field(name: object, known: Collection[str]) -> str | None:
    """Return the field that a name stands for: itself, a synonym or the closest; None if none is close."""
    plain = _normalized(name)
    plain = SYNONYMS.get(plain, plain)
    close = [plain] if plain in known else difflib.get_close_matches(plain, known, n=1)
    return close[0] if close else None


def name_hint(name: object, known: Collection[str]) -> str:
    """Return what to write in place of a name that is no field, as a sentence; empty if nothing is close."""
    meant = meant_field(name, known)
    return advice_for(name) or (f"Did you mean {meant!r}?" if meant else "")


def value_hint(field: str, value: object, nullable: bool) -> str:
    """Return what to write in place of a value that a field does not take; empty if unknown."""
    if field == "resume" and isinstance(value, bool):
        return 'write resume="auto" for the newest checkpoint in run_dir'
    if not isinstance(value, str):
        return ""
    if nullable and value.strip().lower() in _NULLS:
        return "write null for no value"
    return _VALUES.get((field, value.strip().lower()), _OTHER_VALUES.get(field, ""))
