"""The optimizer that a task brings or the config names; ``torch/optimizers.py`` does so for PyTorch."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvdtrain.backends.base import OwnRates
from hvdtrain.backends.own_optimizer import (
    check_own_optimizer,
    check_positive,
    constructor_default,
    scheduled,
)
from hvdtrain.backends.parameter_groups import ParameterOptions
from hvdtrain.backends.tensorflow.large_batch import large_batch_optimizer
from hvdtrain.backends.tensorflow.state.model_state import ModelState
from hvdtrain.backends.tensorflow.steps.formulas import SGD, AdamW
from hvdtrain.config import Config
from hvdtrain.errors import TaskError


def choose_optimizer(
    task: Any, config: Config, model: ModelState, options: Mapping[str, ParameterOptions]
) -> keras.optimizers.Optimizer:
    """Make the optimizer of a job, for the model's trainable variables.

    Args:
        task: the task.
        config: the config.
        model: the model's variables.
        options: the options of each trainable parameter, for the built-in optimizers.

    Raises:
        TaskError: If the task gives something else than an optimizer.
    """
    if hasattr(task, "tf_optimizer"):
        optimizer = task.tf_optimizer()
        check_own_optimizer(optimizer, keras.optimizers.Optimizer, "tf_optimizer", "a Keras optimizer")
        assert isinstance(optimizer, keras.optimizers.Optimizer)  # that it is one was checked
        return optimizer
    own = [options[field.name] for field in model.trainable_fields()]
    is_plain = set(own) == {ParameterOptions(1.0, config.weight_decay)}
    groups = None if is_plain else [(each.factor, each.weight_decay) for each in own]
    if config.optimizer in ("lars", "lamb"):
        return large_batch_optimizer(config, model.trainable_fields(), groups)
    if config.optimizer == "adamw":
        return AdamW(
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            epsilon=config.adam_epsilon,
            decoupled_decay=config.weight_decay,
            groups=groups,
        )
    return SGD(momentum=config.momentum, l2=config.weight_decay, groups=groups)


def take_own_rates(optimizer: keras.optimizers.Optimizer, method: str = "tf_optimizer") -> OwnRates:
    """Return the learning rate of a task's optimizer: one, as Keras has no parameter groups.

    Args:
        optimizer: the optimizer.
        method: the task's method that made it.

    Raises:
        TaskError: If it is a schedule or a function, or not a positive number; or if the optimizer keeps a
            moving average of the weights, which only ``model.fit`` would use.
    """
    inner = optimizer
    while getattr(inner, "inner_optimizer", None) is not None:  # one that scales losses
        inner = inner.inner_optimizer
    if not isinstance(inner._learning_rate, keras.Variable):
        raise scheduled(method, type(inner._learning_rate).__name__)
    if inner.use_ema:
        raise TaskError(
            f"the optimizer of {method}() keeps a moving average of the weights (use_ema=True), which "
            "evaluation, checkpoints and exports would not use",
            f"Leave out use_ema, and set ema_decay: {inner.ema_momentum:g} in the config: they then use the "
            "average, which does not overwrite the weights in training.",
        )
    # the shortest number that is the same in 32 bits: 0.001, not 0.0010000000474974513
    base = float(str(np.float32(inner._learning_rate.numpy())))
    check_positive(base, method)
    default = constructor_default(inner, "learning_rate")
    is_default = isinstance(default, int | float) and np.float32(default) == np.float32(base)
    return OwnRates(type(inner).__name__, base, bool(is_default))
