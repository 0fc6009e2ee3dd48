"""The learning rate of a job: the config's, or that of the task's own optimizer."""

import math

from hvdtrain.backends.base import OwnRates
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, TaskError


def with_learning_rate(config: Config, own: OwnRates | None) -> Config:
    """Return the config with the learning rate that the job trains with.

    Args:
        config: the resolved config; its ``learning_rate`` is None if no source set one.
        own: the learning rates of the task's own optimizer, if it brings one.

    Raises:
        ConfigError: If a source set a learning rate and the optimizer has another one, which is not
            merely the default of its constructor.
        TaskError: If neither has one.
    """
    rate = config.learning_rate
    if own is None:
        rate = config.base_learning_rate
    elif rate is None:
        if own.base is None:
            raise TaskError(
                f"neither the config nor the task's own optimizer, {own.optimizer}, has a learning rate",
                "Set learning_rate, or give the optimizer one.",
                everywhere=True,
            )
        rate = own.base
    elif own.base is not None and not own.is_default and not math.isclose(rate, own.base, rel_tol=1e-6):
        raise ConfigError(
            f"learning_rate is {rate:g}, and the task's own optimizer, {own.optimizer}, has {_rates(own)}",
            "Leave learning_rate out to train with the optimizer's, or make the optimizer without a rate of "
            "its own. In PyTorch, lr_scale of a parameter group is a multiple of learning_rate.",
            everywhere=True,
        )
    return config.model_copy(update={"learning_rate": rate})


def _rates(own: OwnRates) -> str:
    """Return the learning rates of an optimizer, in words."""
    base = own.base or 0.0
    distinct = dict.fromkeys(base * factor for factor in own.factors)
    if len(distinct) == 1:
        return f"{base:g}"
    return f"groups with {' and '.join(f'{rate:g}' for rate in distinct)}"
