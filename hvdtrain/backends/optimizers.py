"""Several optimizers of one task: their names, the parameters of each, and their learning rates."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.backends.base import OwnRates
from hvdtrain.backends.own_optimizer import check_own_optimizer
from hvdtrain.config import Config
from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS

MAIN = "main"  # the optimizer of a task that does not name its optimizers
_NAME = re.compile(r"\w[\w.-]*")
_SHOWN = 6  # names in a message


def own_optimizer_method(task: Any, config: Config) -> str:
    """Return the name of the task's method that makes its own optimizers; empty if it has none."""
    row = FRAMEWORKS[config.framework]
    methods = (row.optimizers_method, row.optimizer_method)
    return next((method for method in methods if hasattr(task, method)), "")


def check_named_optimizers(given: Any, kind: type, method: str) -> dict[str, Any]:
    """Return a task's optimizers by name.

    Args:
        given: what the task's method returned.
        kind: the framework's class of optimizers.
        method: the task's method.

    Raises:
        TaskError: If it is no mapping of names to optimizers that hvdtrain can drive.
    """
    if not isinstance(given, Mapping) or not given:
        found = "an empty mapping" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise TaskError(
            f"{method}(model) must return a mapping of names to optimizers, found {found}",
            'Return {"generator": optimizer, "discriminator": another}, for example.',
        )
    for name, optimizer in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise TaskError(
                f"{method}(model) has the name {name!r}, which cannot be part of a saved name",
                "Use letters, digits, _, - and dots.",
            )
        check_own_optimizer(optimizer, kind, method, f"an optimizer as {name!r}")
    return dict(given)


def check_owners(
    method: str, trainable: Sequence[str], owned: Mapping[str, Sequence[str]], foreign: Mapping[str, int]
) -> None:
    """Check that exactly one optimizer trains each trainable parameter.

    Args:
        method: the task's method that made the optimizers.
        trainable: names of all trainable parameters.
        owned: optimizer to the names of those that it trains.
        foreign: optimizer to the number of its parameters that are not the model's.

    Raises:
        TaskError: naming the parameters and the optimizers.
    """
    for optimizer, count in foreign.items():
        if count:
            raise TaskError(
                f"{method}(model): the optimizer {optimizer!r} has {count} parameters that are not the "
                "model's; they would be neither equal on all workers nor saved",
                "Make them parameters of the model, for example as a submodule.",
            )
    by_name: dict[str, list[str]] = {name: [] for name in trainable}
    for optimizer, names in owned.items():
        for name in names:
            by_name[name].append(optimizer)
    several = [name for name, of_one in by_name.items() if len(of_one) > 1]
    if several:
        raise TaskError(
            f"{method}(model): {_some(several)} belong to several optimizers: "
            f"{' and '.join(map(repr, by_name[several[0]]))}",
            "Give each parameter to one of them: steps of the others would be undone by its slots.",
        )
    without = [name for name, of_one in by_name.items() if not of_one]
    if without:
        raise TaskError(
            f"{method}(model): no optimizer trains {_some(without)}",
            "Give them to an optimizer, or freeze them with requires_grad or trainable.",
        )
    for optimizer, names in owned.items():
        if not names:
            raise TaskError(f"{method}(model): the optimizer {optimizer!r} has no trainable parameter")


def in_one_array(name: str) -> TaskError:
    """Return the error for an array of the saved state whose parts belong to different optimizers."""
    return TaskError(
        f"parts of {name} belong to different optimizers; it is saved as one array",
        "Give all parameters of a module to the same optimizer.",
    )


def combined_rates(rates: Mapping[str, OwnRates]) -> tuple[OwnRates, dict[str, float]]:
    """Return the learning rates of several optimizers as one, and each one's base relative to the largest.

    The factors of an optimizer's groups are to be multiplied by its own relative base.

    Args:
        rates: the learning rates of each optimizer, by name.
    """
    if list(rates) == [MAIN]:
        return rates[MAIN], {MAIN: 1.0}
    bases = [own.base for own in rates.values() if own.base is not None]
    base = max(bases) if bases else None
    relative = {
        name: own.base / base if own.base is not None and base is not None else 1.0
        for name, own in rates.items()
    }
    factors = tuple(factor * relative[name] for name, own in rates.items() for factor in own.factors)
    # a rate in the config replaces defaults of constructors only if they agree: otherwise it is not said
    # which of them it is meant for
    is_default = all(own.is_default for own in rates.values()) and len(set(bases)) < 2
    names = ", ".join(f"{name}: {own.optimizer}" for name, own in rates.items())
    return OwnRates(names, base, is_default, factors), relative


def state_prefixes(names: Sequence[str]) -> dict[str, str]:
    """Return what stands before the slots of each optimizer in a portable state, after ``optimizer/``.

    A single optimizer ``main`` has the names that a task without an own step has.
    """
    return {MAIN: ""} if list(names) == [MAIN] else {name: f"{name}/" for name in names}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > _SHOWN else "")
