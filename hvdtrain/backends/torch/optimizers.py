"""The optimizer that a task brings or the config names; ``tensorflow/optimizers.py`` does so for Keras."""

from typing import Any

import torch

from hvdtrain.backends.torch.large_batch import large_batch_optimizer
from hvdtrain.backends.torch.model_state import ModelState
from hvdtrain.config import Config
from hvdtrain.errors import TaskError


def choose_optimizer(task: Any, config: Config, model: ModelState) -> torch.optim.Optimizer:
    """Make the optimizer of a job, for the model's trainable parameters.

    Raises:
        TaskError: If the task gives something else than an optimizer.
    """
    parameters = [entry.tensor for entry in model.entries if entry.trainable]
    if hasattr(task, "torch_optimizer"):
        optimizer = task.torch_optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TaskError(f"torch_optimizer() must give an optimizer, found {type(optimizer).__name__}")
        return optimizer
    if config.optimizer in ("lars", "lamb"):
        return large_batch_optimizer(config, model.trainable_fields())
    decay, fused = config.weight_decay, all(p.is_floating_point() for p in parameters)
    if config.optimizer == "adamw":
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW(
            parameters, betas=betas, eps=config.adam_epsilon, weight_decay=decay, fused=fused
        )
    return torch.optim.SGD(
        parameters,
        lr=config.learning_rate,
        momentum=config.momentum,
        weight_decay=decay,
        fused=fused,
    )
