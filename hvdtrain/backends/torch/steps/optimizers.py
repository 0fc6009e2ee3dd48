"""The optimizer that a task brings or the config names; ``tensorflow/optimizers.py`` does so for Keras."""

from collections.abc import Mapping
from typing import Any

import torch

from hvdtrain.backends.base import OwnRates
from hvdtrain.backends.own_optimizer import (
    check_own_optimizer,
    check_positive,
    constructor_default,
    scheduled,
)
from hvdtrain.backends.parameter_groups import ParameterOptions, in_one_tensor
from hvdtrain.backends.torch.large_batch import large_batch_optimizer
from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.config import Config


def choose_optimizer(
    task: Any, config: Config, model: ModelState, options: Mapping[str, ParameterOptions]
) -> torch.optim.Optimizer:
    """Make the optimizer of a job, for the model's trainable parameters.

    Args:
        task: the task.
        config: the config.
        model: the model's tensors.
        options: the options of each trainable parameter, for the built-in optimizers.

    Raises:
        TaskError: If the task gives something else than an optimizer, or one with a scheduler.
        ConfigError: If parameters that are parts of one tensor have different options.
    """
    parameters = [entry.tensor for entry in model.entries if entry.trainable]
    if hasattr(task, "torch_optimizer"):
        optimizer = task.torch_optimizer(parameters)
        check_own_optimizer(optimizer, torch.optim.Optimizer, "torch_optimizer", "an optimizer")
        assert isinstance(optimizer, torch.optim.Optimizer)  # that it is one was checked
        return optimizer
    by_tensor = _options_by_tensor(model, options)
    if config.optimizer in ("lars", "lamb"):
        return large_batch_optimizer(config, model.trainable_fields(), by_tensor)
    groups: dict[ParameterOptions, dict[str, Any]] = {}
    for parameter in parameters:
        own = by_tensor[parameter]
        empty = {"params": [], "weight_decay": own.weight_decay, "lr_scale": own.factor}
        groups.setdefault(own, empty)["params"].append(parameter)
    if not groups:  # of a stage without parameters
        groups[ParameterOptions(1.0, 0.0)] = {"params": [], "weight_decay": 0.0, "lr_scale": 1.0}
    fused = all(p.is_floating_point() for p in parameters)
    if config.optimizer == "adamw":
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW(list(groups.values()), betas=betas, eps=config.adam_epsilon, fused=fused)
    return torch.optim.SGD(list(groups.values()), momentum=config.momentum, fused=fused)


def _options_by_tensor(
    model: ModelState, options: Mapping[str, ParameterOptions]
) -> dict[torch.Tensor, ParameterOptions]:
    """Return the options of each trainable tensor, of which several parameters may be parts."""
    names: dict[torch.Tensor, list[str]] = {}
    for field in model.trainable_fields():
        for tensor in field.tensors:
            names.setdefault(tensor, []).append(field.name)
    for of_one in names.values():
        if len({options[name] for name in of_one}) > 1:
            raise in_one_tensor(of_one)
    return {tensor: options[of_one[0]] for tensor, of_one in names.items()}


def take_own_rates(optimizer: torch.optim.Optimizer) -> OwnRates:
    """Take the learning rates of a task's optimizer as its own; the largest is the base.

    From then on, a group's ``lr_scale`` is its rate relative to the base: its own rate / the base, times
    the ``lr_scale`` that the task gave it.

    Raises:
        TaskError: If a scheduler is attached to it, or the base is not a positive number.
    """
    groups = optimizer.param_groups
    if any("initial_lr" in group for group in groups):  # every scheduler of PyTorch writes this
        raise scheduled("torch_optimizer", "torch.optim.lr_scheduler")
    rates = [None if group.get("lr") is None else float(group["lr"]) for group in groups]
    default = constructor_default(optimizer, "lr")
    is_default = all(rate is None or (default is not None and rate == float(default)) for rate in rates)
    given = [rate for rate in rates if rate is not None]
    base = max(given) if given else None
    if base is not None:
        check_positive(base, "torch_optimizer")
    factors = []
    for group, rate in zip(groups, rates, strict=True):
        own = 1.0 if rate is None or base is None else rate / base
        factors.append(own * float(group.get("lr_scale", 1.0)))
        if factors[-1] != 1.0 or "lr_scale" in group:
            group["lr_scale"] = factors[-1]
    return OwnRates(type(optimizer).__name__, base, is_default, tuple(factors))
