"""A task's own optimizer: what is refused, and which learning rate its constructor has by default."""

import inspect
from typing import Any

from hvdtrain.errors import TaskError


def check_own_optimizer(optimizer: Any, kind: type, method: str, wanted: str) -> None:
    """Check that a task gave an optimizer that hvdtrain can drive.

    Args:
        optimizer: what the task's method returned.
        kind: the framework's class of optimizers.
        method: the task's method.
        wanted: what it should return, in words.

    Raises:
        TaskError: If it is something else, or an optimizer that reduces gradients itself.
    """
    found = type(optimizer)
    if not isinstance(optimizer, kind):
        remedy = ""
        if isinstance(getattr(optimizer, "optimizer", None), kind):
            remedy = "Return the optimizer alone; set the schedule in the config: lr_schedule, warmup_epochs."
        elif isinstance(optimizer, list | tuple):
            prefix = method.partition("_")[0]
            remedy = (
                "Return one optimizer, for all parameters. Several are returned by name from "
                f"{prefix}_optimizers(model) and used in {prefix}_step(model, batch, optimizers)."
            )
            if len(optimizer) == 2 and isinstance(optimizer[0], kind) and not isinstance(optimizer[1], kind):
                remedy = (
                    "Return the optimizer alone; set the schedule in the config: lr_schedule, warmup_epochs."
                )
        elif isinstance(optimizer, type) and issubclass(optimizer, kind):
            remedy = f"Return an instance: {optimizer.__name__}(...), with the arguments that it requires."
        shown = repr(optimizer) if isinstance(optimizer, str | type) else found.__name__
        raise TaskError(f"{method}() must give {wanted}, found {shown}", remedy)
    if found.__module__.startswith("horovod.") or found.__name__ == "DistributedOptimizer":
        raise TaskError(
            f"{method}() gave an optimizer that is wrapped to reduce gradients over workers",
            "Return the plain optimizer: hvdtrain reduces the gradients.",
        )


def scheduled(method: str, schedule: str) -> TaskError:
    """Return the error for an optimizer whose learning rate is scheduled by the framework."""
    return TaskError(
        f"the optimizer of {method}() has a schedule of its own ({schedule}), which would not be used: "
        "hvdtrain sets the learning rate in every step",
        "Give the optimizer a number, and set the schedule in the config: lr_schedule, warmup_epochs.",
    )


def constructor_default(optimizer: Any, argument: str) -> Any:
    """Return the default of an argument of an optimizer's constructor; None if it has none."""
    try:
        parameter = inspect.signature(type(optimizer).__init__).parameters.get(argument)
    except (TypeError, ValueError):  # a constructor that is not written in Python
        return None
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def check_positive(rate: float, method: str) -> None:
    """Check the base of an optimizer's learning rates.

    Raises:
        TaskError: If it is not a positive number.
    """
    if not 0 < rate < float("inf"):
        raise TaskError(
            f"the optimizer of {method}() has the learning rate {rate:g}, which must be greater than 0",
            "Give it another rate; parameters that are not to be trained are frozen with requires_grad "
            "or trainable.",
        )
