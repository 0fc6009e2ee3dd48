"""The search space of a sweep: config fields with ranges or choices."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hvdtrain.config import Config
from hvdtrain.errors import ConfigError
from hvdtrain.field_names import name_hint
from hvdtrain.yaml_reader import write_yaml

_KEYS = ("low", "high", "log", "step")
_OPTIONS = "task_options"
# each trial has its own run directory and continues in it
OF_THE_SWEEP = ("run_dir", "resume")
_MOST_POINTS = 10_000
_FORMS = "Write a range as {low: 1e-4, high: 1e-1, log: true}, or choices as [32, 64]."


@dataclass(frozen=True)
class Dimension:
    """A field of the space.

    Attributes:
        name: the config field; ``task_options.NAME`` for an option of the task.
        choices: the values to choose from; empty for a range.
        low: the lowest value of a range.
        high: the highest value of a range.
        log: whether values are drawn by their logarithm.
        step: the distance of values; None for any.
        is_whole: whether values are whole numbers.
    """

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    is_whole: bool = False

    @property
    def labels(self) -> list[Any]:
        """What stands for each choice in a study: the value, or its text if it is a list or a mapping."""
        return [label_of(choice) for choice in self.choices]

    def value(self, label: Any) -> Any:
        """Return the value that a study's label or number stands for."""
        if not self.choices:
            return label
        found = [one for one in self.choices if label_of(one) == label and _is_alike(label_of(one), label)]
        return found[0]

    def grid(self) -> list[Any]:
        """Return the values of a grid.

        Raises:
            ConfigError: If a range has no step.
        """
        if self.choices:
            return list(self.choices)
        step = self.step or (1 if self.is_whole and not self.log else None)
        if step is None:
            raise ConfigError(
                f"space: {self.name}: a grid needs values, found a range",
                "Give it a step, or a list of values.",
            )
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return [self.low + at * step for at in range(count)]


def label_of(value: Any) -> Any:
    """Return what stands for a choice in a study."""
    return (
        value if value is None or isinstance(value, bool | int | float | str) else write_yaml(value).strip()
    )


def _is_alike(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool)  # True and 1 are equal


def parse_space(values: Any, source: str) -> list[Dimension]:
    """Return the space that a mapping describes.

    Args:
        values: fields with their ranges or choices, as YAML has them.
        source: where they are from, for messages.

    Raises:
        ConfigError: naming the field, the rule and what was found.
    """
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(f"{source}: should be a mapping of config fields, found {values!r}", _FORMS)
    return [_dimension(str(name), value, source) for name, value in values.items()]


def _dimension(name: str, value: Any, source: str) -> Dimension:
    where = f"{source}: {name}"
    field, dot, option = name.partition(".")
    if field not in Config.model_fields:
        hint = name_hint(field, Config.model_fields)
        raise ConfigError(
            f"{source}: there is no field {field!r}", hint or "docs/config.md lists every field."
        )
    if field in OF_THE_SWEEP:
        raise ConfigError(f"{where}: the sweep sets it for each trial", "Leave it out.")
    if (field == _OPTIONS) != bool(dot and option):
        raise ConfigError(
            f"{where}: only {_OPTIONS} has fields of its own, and they are searched one by one",
            f"Write {_OPTIONS}.NAME for an option of the task.",
        )
    found = _choices(name, value, where) if isinstance(value, list) else _range(name, value, where)
    for one in found.choices or (found.low, found.high):
        _check_value(field, one, where)
    return found


def _choices(name: str, values: Sequence[Any], where: str) -> Dimension:
    labels = [(type(label_of(one)).__name__, label_of(one)) for one in values]
    if not values or len(set(labels)) < len(labels):
        raise ConfigError(f"{where}: should be a list of different values, found {values!r}", _FORMS)
    return Dimension(name, tuple(values))


def _range(name: str, value: Any, where: str) -> Dimension:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where}: should be a range or a list of choices, found {value!r}",
            f"{_FORMS} A value that all trials share belongs to the job's options.",
        )
    unknown = [key for key in value if key not in _KEYS]
    if unknown or not {"low", "high"} <= value.keys():
        raise ConfigError(f"{where}: a range has low, high and perhaps {_KEYS[2:]}, found {value!r}", _FORMS)
    low, high, step, log = value["low"], value["high"], value.get("step"), value.get("log", False)
    for key, one in (("low", low), ("high", high), *([("step", step)] if step is not None else [])):
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            raise ConfigError(f"{where}.{key}: should be a finite number, found {one!r}")
    if not isinstance(log, bool):
        raise ConfigError(f"{where}.log: should be true or false, found {log!r}")
    if not low < high:
        raise ConfigError(f"{where}: the range is empty: low must be less than high, found {low} and {high}")
    if log and low <= 0:
        raise ConfigError(
            f"{where}.low: must be greater than 0 with log: true, found {low}",
            "Give a small number, or leave log out.",
        )
    if step is not None and (log or step <= 0):
        raise ConfigError(f"{where}.step: must be greater than 0, and there is none with log: true")
    is_whole = _is_whole(name, (low, high, *([step] if step is not None else [])), where)
    return Dimension(name, (), low, high, log, step, is_whole)


def _is_whole(name: str, numbers: Sequence[float], where: str) -> bool:
    """Return whether a range has whole numbers: as its field has, or, of the task's options, as written.

    Raises:
        ConfigError: If the field has whole numbers and the range has not, or the field has no numbers.
    """
    are_whole = all(isinstance(one, int) for one in numbers)
    if "." in name:
        return are_whole
    annotation = Config.model_fields[name].annotation
    kinds = {kind for kind in (annotation, *get_args(annotation)) if kind in (int, float)}
    if float in kinds:
        return False
    if int in kinds and not are_whole:
        raise ConfigError(f"{where}: the field is a whole number, so low, high and step must be", _FORMS)
    if int in kinds:
        return True
    raise ConfigError(f"{where}: the field is no number, so it has no range", "Give a list of choices.")


def _check_value(field: str, value: Any, where: str) -> None:
    """Check that a field may have a value, as far as the field alone tells.

    Raises:
        ConfigError: If it may not.
    """
    info = Config.model_fields[field]
    if field == _OPTIONS:
        return
    kind: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    try:
        TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        rule = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise ConfigError(f"{where}: {rule}, found {value!r}") from None


def grid_points(space: Sequence[Dimension]) -> list[dict[str, Any]]:
    """Return all points of a grid, with the labels that a study has.

    Raises:
        ConfigError: If a range has no step, or there are too many points.
    """
    values = [one.grid() for one in space]
    count = math.prod(map(len, values))
    if count > _MOST_POINTS:
        raise ConfigError(
            f"space: the grid has {count:,} points; at most {_MOST_POINTS:,}",
            "Leave values out, or use the sampler random or tpe.",
        )
    names = [one.name for one in space]
    return [dict(zip(names, map(label_of, point), strict=True)) for point in itertools.product(*values)]


def config_values(space: Sequence[Dimension], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config fields of a point.

    Args:
        space: the space.
        point: labels and numbers by name, as a study has them.
    """
    values: dict[str, Any] = {}
    for one in space:
        field, _, option = one.name.partition(".")
        value = one.value(point[one.name])
        if option:
            values.setdefault(field, {})[option] = value
        else:
            values[field] = value
    return values


def first_point(space: Sequence[Dimension]) -> dict[str, Any]:
    """Return a point of the space: the first choices and the lowest values."""
    return {one.name: one.labels[0] if one.choices else one.low for one in space}
