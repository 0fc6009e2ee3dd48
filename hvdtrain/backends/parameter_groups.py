"""Which options of the optimizer each parameter has: ``parameter_groups`` and ``decay_norms_and_biases``.

Patterns match portable names, so both frameworks choose alike.
"""

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hvdtrain.backends.base import Shapes
from hvdtrain.backends.large_batch import adapts
from hvdtrain.config import Config, ParameterGroup
from hvdtrain.errors import ConfigError

_SHOWN = 6  # names in a message


@dataclass(frozen=True)
class ParameterOptions:
    """What the optimizer does with one parameter.

    Attributes:
        factor: what the learning rate is multiplied by.
        weight_decay: its weight decay.
    """

    factor: float
    weight_decay: float


class ParameterGroups:
    """The options of every trainable parameter, by portable name.

    Args:
        config: the config.
        shapes: shapes of the trainable parameters by portable name.
        own_optimizer: the task's method that makes its own optimizer; empty if it has none.

    Attributes:
        options: the options of each parameter that is trained.
        frozen: the parameters that are not.
        lines: the groups, for the plan.

    Raises:
        ConfigError: If a pattern matches no parameter, or only those of earlier patterns, or the task brings
            its own optimizer.
    """

    def __init__(self, config: Config, shapes: Shapes, own_optimizer: str = "") -> None:
        if own_optimizer and config.parameter_groups:
            raise ConfigError(
                "parameter_groups are options of the built-in optimizers; the task brings its own",
                f"Leave parameter_groups out and make the groups in {own_optimizer}().",
                everywhere=True,
            )
        chosen = {name: _first_match(config, name) for name in shapes}
        self.options: dict[str, ParameterOptions] = {}
        self.frozen: set[str] = set()
        undecayed = 0
        for name, shape in shapes.items():
            group = chosen[name]
            if group is not None and group.frozen:
                self.frozen.add(name)
                continue
            spared = not (config.decay_norms_and_biases or adapts(name, tuple(shape)))
            decay = 0.0 if spared else config.weight_decay
            if group is not None and group.weight_decay is not None:
                decay, spared = group.weight_decay, False
            undecayed += spared
            self.options[name] = ParameterOptions(group.learning_rate_factor if group else 1.0, decay)
        self.lines = [_line(group, _count(group, chosen, shapes)) for group in config.parameter_groups]
        if config.optimizer in ("lars", "lamb") and any(
            group.weight_decay for group in config.parameter_groups
        ):
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


def _first_match(config: Config, name: str) -> ParameterGroup | None:
    return next((group for group in config.parameter_groups if _matches(group, name)), None)


def _matches(group: ParameterGroup, name: str) -> bool:
    return fnmatchcase(name, group.match)


def _count(group: ParameterGroup, chosen: dict[str, ParameterGroup | None], shapes: Shapes) -> int:
    """Return how many parameters a group has.

    Raises:
        ConfigError: If there are none.
    """
    count = sum(other is group for other in chosen.values())
    if count:
        return count
    matched = [name for name in shapes if _matches(group, name)]
    if matched:
        problem = f"matches only parameters that an earlier pattern has: {_some(matched)}"
        remedy = "The first pattern that matches counts; put the special one before the general one."
    else:
        problem = "matches no parameter that is trained"
        close = difflib.get_close_matches(group.match, shapes, n=_SHOWN, cutoff=0.3)
        remedy = f"There are, for example, {_some(close or list(shapes))}; * stands for any text."
    raise ConfigError(f"parameter_groups: the pattern {group.match!r} {problem}", remedy, everywhere=True)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _line(group: ParameterGroup, count: int) -> str:
    parts: list[Any] = []
    if group.learning_rate_factor != 1:
        parts.append(f"learning rate x {group.learning_rate_factor:g}")
    if group.weight_decay is not None:
        parts.append(f"weight decay {group.weight_decay:g}")
    text = "frozen" if group.frozen else " and ".join(parts) or "as all"
    return f"{group.match} ({count}): {text}"
