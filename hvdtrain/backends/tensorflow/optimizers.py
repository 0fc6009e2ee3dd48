"""The optimizer that a task brings or the config names; ``torch/optimizers.py`` does so for PyTorch."""

from typing import Any

import keras

from hvdtrain.backends.tensorflow.formulas import SGD, AdamW
from hvdtrain.backends.tensorflow.large_batch import large_batch_optimizer
from hvdtrain.backends.tensorflow.model_state import ModelState
from hvdtrain.config import Config
from hvdtrain.errors import TaskError


def choose_optimizer(task: Any, config: Config, model: ModelState) -> keras.optimizers.Optimizer:
    """Make the optimizer of a job, for the model's trainable variables.

    Raises:
        TaskError: If the task gives something else than an optimizer.
    """
    if hasattr(task, "tf_optimizer"):
        optimizer = task.tf_optimizer()
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TaskError(f"tf_optimizer() must give a Keras optimizer, found {type(optimizer).__name__}")
        return optimizer
    if config.optimizer in ("lars", "lamb"):
        return large_batch_optimizer(config, model.trainable_fields())
    if config.optimizer == "adamw":
        return AdamW(
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            epsilon=config.adam_epsilon,
            decoupled_decay=config.weight_decay,
        )
    return SGD(momentum=config.momentum, l2=config.weight_decay)
