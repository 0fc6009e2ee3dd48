"""Checks of task_options that the built-in tasks share."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.errors import TaskError


def whole(name: str, value: Any, least: int, most: int = 1 << 31) -> int:
    """Return an option that must be an integer from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limits = f"of at least {least}" if most == 1 << 31 else f"from {least} to {most}"
        raise wrong(name, f"a whole number {limits}", value)
    return value


def fraction(name: str, value: Any) -> float:
    """Return an option that must be a number of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise wrong(name, "a number that is at least 0 and below 1", value)
    return float(value)


def text(name: str, value: Any) -> str:
    """Return an option that must be text and not empty."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise wrong(name, "text", value)
    return value


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return an option that must be one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise wrong(name, f"one of {', '.join(choices)}", value)
    return value


def listed(name: str, value: Any) -> list[Any]:
    """Return an option that must be a list."""
    if not isinstance(value, list | tuple):
        raise wrong(name, "a list", value)
    return list(value)


def sizes(layers: Any, heads: Any, channels: Any, dropout: Any) -> dict[str, Any]:
    """Return the sizes of a transformer."""
    return {
        "layers": whole("layers", layers, 1, 1000),
        "heads": whole("heads", heads, 1, 1000),
        "channels": whole("channels", channels, 1, 1 << 16),
        "dropout": fraction("dropout", dropout),
    }


def wrong(name: str, rule: str, value: Any) -> TaskError:
    """Return the error that names the rule for an option and its value."""
    return TaskError(f"task_options.{name} must be {rule}, found {value!r}")
