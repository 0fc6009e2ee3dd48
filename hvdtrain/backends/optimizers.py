"""Options of parameters (groups), checks of a task's own optimizer, several optimizers of a task by name."""

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hvdtrain.backends.options import is_matrix
from hvdtrain.backends.records import OwnRates, Shapes
from hvdtrain.config import Config
from hvdtrain.config.values import ParameterGroup
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.storage.text import some


def check_own_optimizer(optimizer: Any, kind: type, method: str, wanted: str) -> None:
    """Check that a task gave an optimizer that hvdtrain can drive."""
    found = type(optimizer)
    if not isinstance(optimizer, kind):
        several = f"{method.partition('_')[0]}_optimizers(model)"
        remedy = (
            f"Return one instance, for all parameters; several are returned by name from {several}. The "
            "schedule is set in the config: lr_schedule, warmup_epochs."
        )
        shown = repr(optimizer) if isinstance(optimizer, str | type) else found.__name__
        raise TaskError(f"{method}() must give {wanted}, found {shown}", remedy)
    if found.__module__.startswith("horovod.") or found.__name__ == "DistributedOptimizer":
        raise TaskError(
            f"{method}() gave an optimizer that is wrapped to reduce gradients over workers",
            "Return the plain optimizer: hvdtrain reduces the gradients.",
        )
    closure = inspect.signature(getattr(optimizer, "step", repr)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"{method}() gave {found.__name__}, whose step computes the loss several times, with a closure",
            "Take one whose step needs none, such as SGD or AdamW.",
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
    """Check the base of an optimizer's learning rates."""
    if not 0 < rate < float("inf"):
        raise TaskError(
            f"the optimizer of {method}() has the learning rate {rate:g}, which must be greater than 0",
            "Give it another rate; parameters that are not to be trained are frozen with requires_grad "
            "or trainable.",
        )


_SHOWN = 6  # names in a message


@dataclass(frozen=True)
class ParameterOptions:
    """What the optimizer does with one parameter."""

    factor: float  # what the learning rate is multiplied by
    weight_decay: float  # its weight decay


class ParameterGroups:
    """The options of every trainable parameter, by portable name."""

    def __init__(self, config: Config, shapes: Shapes, own_optimizer: str = "") -> None:
        groups = config.parameter_groups
        chosen = {n: next((one for one in groups if fnmatchcase(n, one.match)), None) for n in shapes}
        self.options: dict[str, ParameterOptions] = {}
        self.frozen: set[str] = set()
        undecayed = 0
        for name, shape in shapes.items():
            group = chosen[name]
            if group is not None and group.frozen:
                self.frozen.add(name)
                continue
            spared = not (config.decay_norms_and_biases or is_matrix(name, tuple(shape)))
            decay = 0.0 if spared else config.weight_decay
            if group is not None and group.weight_decay is not None:
                decay, spared = group.weight_decay, False
            undecayed += spared
            self.options[name] = ParameterOptions(group.learning_rate_factor if group else 1.0, decay)
        self.lines = [_line(group, _count(group, chosen, shapes)) for group in groups]
        if config.optimizer in ("lars", "lamb") and any(group.weight_decay for group in groups):
            self.lines.append(f"norms and biases: {config.optimizer} never decays them")
        if undecayed and config.weight_decay and not own_optimizer:
            self.lines.append(f"norms and biases ({undecayed}): weight decay 0")


def in_one_tensor(names: list[str]) -> ConfigError:
    """Return the error for parameters with different options of which the framework has one tensor."""
    return ConfigError(
        f"parameter_groups: {' and '.join(names)} are parts of one tensor, and have different options",
        "Give them the same options, for example by one pattern that matches all of them.",
        everywhere=True,
    )


def _count(group: ParameterGroup, chosen: dict[str, ParameterGroup | None], shapes: Shapes) -> int:
    """Return how many parameters a group has."""
    count = sum(other is group for other in chosen.values())
    if count:
        return count
    matched = [name for name in shapes if fnmatchcase(name, group.match)]
    if matched:
        problem = f"matches only parameters that an earlier pattern has: {some(matched, _SHOWN)}"
        remedy = "The first pattern that matches counts; put the special one before the general one."
    else:
        problem = "matches no parameter that is trained"
        close = difflib.get_close_matches(group.match, shapes, n=_SHOWN, cutoff=0.3)
        remedy = f"There are, for example, {some(close or list(shapes), _SHOWN)}; * stands for any text."
    raise ConfigError(f"parameter_groups: the pattern {group.match!r} {problem}", remedy, everywhere=True)


def _line(group: ParameterGroup, count: int) -> str:
    parts: list[Any] = []
    if group.learning_rate_factor != 1:
        parts.append(f"learning rate x {group.learning_rate_factor:g}")
    if group.weight_decay is not None:
        parts.append(f"weight decay {group.weight_decay:g}")
    text = "frozen" if group.frozen else " and ".join(parts) or "as all"
    return f"{group.match} ({count}): {text}"


MAIN = "main"  # the optimizer of a task that does not name its optimizers
_NAME = re.compile(r"\w[\w.-]*")


def own_optimizer_method(task: Any, config: Config) -> str:
    """Return the name of the task's method that makes its own optimizers; empty if it has none."""
    row = FRAMEWORKS[config.framework]
    methods = (row.optimizers_method, row.optimizer_method)
    return next((method for method in methods if hasattr(task, method)), "")


def check_named_optimizers(given: Any, kind: type, method: str) -> dict[str, Any]:
    """Return a task's optimizers by name."""
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
    """Check that exactly one optimizer trains each trainable parameter."""
    for optimizer, names in owned.items():
        if count := foreign.get(optimizer):
            raise TaskError(
                f"{method}(model): the optimizer {optimizer!r} has {count} parameters that are not the "
                "model's; they would be neither equal on all workers nor saved",
                "Make them parameters of the model, for example as a submodule.",
            )
        if not names:
            raise TaskError(f"{method}(model): the optimizer {optimizer!r} has no trainable parameter")
    owners = {name: [one for one, names in owned.items() if name in names] for name in trainable}
    if several := [name for name, of_one in owners.items() if len(of_one) > 1]:
        raise TaskError(
            f"{method}(model): {some(several, _SHOWN)} belong to several optimizers: "
            f"{' and '.join(map(repr, owners[several[0]]))}",
            "Give each parameter to one of them: steps of the others would be undone by its slots.",
        )
    if without := [name for name, of_one in owners.items() if not of_one]:
        raise TaskError(
            f"{method}(model): no optimizer trains {some(without, _SHOWN)}",
            "Give them to an optimizer, or freeze them with requires_grad or trainable.",
        )


def combined_rates(rates: Mapping[str, OwnRates]) -> tuple[OwnRates, dict[str, float]]:
    """Return the learning rates of several optimizers as one, and each one's base relative to the largest."""
    if list(rates) == [MAIN]:
        return rates[MAIN], {MAIN: 1.0}
    bases = [own.base for own in rates.values() if own.base is not None]
    base = max(bases) if bases else None
    relative = {name: own.base / base if own.base and base else 1.0 for name, own in rates.items()}
    factors = tuple(factor * relative[name] for name, own in rates.items() for factor in own.factors)
    # a rate in the config replaces defaults of constructors only if they agree: otherwise it is not said
    # which of them it is meant for
    is_default = all(own.is_default for own in rates.values()) and len(set(bases)) < 2
    names = ", ".join(f"{name}: {own.optimizer}" for name, own in rates.items())
    return OwnRates(names, base, is_default, factors), relative
