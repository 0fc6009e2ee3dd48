"""Where the values of a configuration come from: its sources, and which of them takes precedence.

Precedence, weakest first: field defaults, the task's ``defaults``, the YAML file, ``--set``,
options. A field that a later source sets also replaces its alternative from an earlier one:
``--steps`` on the command line replaces ``epochs`` from the file.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hvdtrain.config import Config, Layer, is_nullable
from hvdtrain.config.field_names import advice_for, meant_field, value_hint
from hvdtrain.config.yaml_reader import parse_yaml
from hvdtrain.errors import ConfigError
from hvdtrain.storage.files import open_regular
from hvdtrain.storage.urls import shown

# setting one field of a pair removes the other field if a source of lower precedence set it
_EITHER_OR = (("epochs", "steps"), ("batch_size", "global_batch_size"), ("warmup_epochs", "warmup_steps"))

_SHOWN_CHARACTERS = 200
_ALL_FIELDS = "`hvdtrain docs config` lists every field."


def resolve(layers: Iterable[Layer], task_parameters: Collection[str] = ()) -> Config:
    """Merge layers, lowest precedence first, into a valid Config."""
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = list(layers)
    unknown, wrong = _unknown_names(layers, task_parameters), list[str]()
    for layer in layers:
        for one, other in _EITHER_OR:
            given = [field for field in (one, other) if layer.values.get(field) is not None]
            if len(given) == 2:
                raise ConfigError(
                    f"{layer.source} sets both {one} and {other}", f"Give either {one} or {other}."
                )
            if given:
                merged.pop(other if given == [one] else one, None)
        for field, value in layer.values.items():
            if field in Config.model_fields:
                merged[field] = _merged(merged.get(field), value)
                sources[field] = layer.source
    if merged.get("framework") is None and not unknown:
        raise ConfigError("no framework is given", "Add --framework torch or --framework tf.")
    if merged.get("epochs") is None and merged.get("steps") is None:
        merged["epochs"] = 10.0
    try:
        config = Config(**merged)
    except ValidationError as error:
        # a missing framework is no news where a name is wrong
        details = (one for one in error.errors() if (one["type"], one["loc"]) != ("missing", ("framework",)))
        wrong = [_describe(detail, sources) for detail in details]
    if len(unknown) == 1 and not wrong:
        problem, hint = unknown[0]
        raise ConfigError(problem, hint or _ALL_FIELDS)
    if unknown or wrong:
        lines = [f"{problem}. {hint}" if hint else problem for problem, hint in unknown]
        raise ConfigError("\n".join([*lines, *wrong]), _ALL_FIELDS if unknown else "")
    _check_writable(config, sources)
    return config


def _merged(lower: Any, higher: Any) -> Any:
    """Return the second value; merge the keys of both, at any depth, if both are mappings."""
    if not (isinstance(lower, Mapping) and isinstance(higher, Mapping)):
        return higher
    return {**lower, **{key: _merged(lower.get(key), value) for key, value in higher.items()}}


def _unknown_names(layers: Iterable[Layer], task_parameters: Collection[str]) -> list[tuple[str, str]]:
    """Return the problem with each name that no field has, and a hint."""
    unknown: list[tuple[str, str]] = []
    for layer in layers:
        for name, value in layer.values.items():
            if name in Config.model_fields:
                continue
            meant = meant_field(name, Config.model_fields)
            hint = advice_for(name) or (f"Did you mean {meant!r}?" if meant else "")
            if name in task_parameters:
                in_python = f"task_options={{{name!r}: {value!r}}}"
                option = in_python if layer.source.endswith("()") else f"task_options: {{{name}: {value}}}"
                hint = f"The task's constructor takes it: write {option}."
            unknown.append((f"{layer.source}: there is no field {name!r}", hint))
    return unknown


def _check_writable(config: Config, sources: Mapping[str, str]) -> None:
    """Check that the config can be written to the run directory, as it is before training."""
    try:
        config.to_yaml()
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"task_options: cannot be written to config.yaml: {_shortened(str(error))} "
            f"({sources.get('task_options', 'default')})",
            "Use numbers, text, lists and mappings.",
        ) from None


def _describe(detail: Any, sources: Mapping[str, str]) -> str:
    """Return one pydantic error as "field: rule, found value (source)"."""
    rule = re.sub(r"^(Value error, |Input )", "", detail["msg"])
    if not detail["loc"]:
        return rule
    field = str(detail["loc"][0])
    where = ".".join(str(part) for part in detail["loc"])
    hint = value_hint(field, detail["input"], is_nullable(field))
    found = f"{where}: {rule}, found {_found(detail['input'])} ({sources.get(field, 'default')})"
    return f"{found}; {hint}" if hint else found


def _found(value: object) -> str:
    """Return a value as a message shows it, without passwords of URLs."""
    try:
        # what an option that may be given several times was given
        words = ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
        return _shortened(shown(words))
    except (ValueError, RecursionError):  # Python does not write integers of more than 4300 digits
        return f"a value of type {type(value).__name__} that is too large to show"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def read_file(path: Path) -> Layer:
    """Read a YAML config file."""
    try:
        # a shell passes <(...) as a file of /dev; any other pipe may have no writer
        with path.open("rb") if path.is_relative_to("/dev") else open_regular(path) as file:
            text = file.read().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the config file {path}: {reason}") from None
    values = parse_yaml(text, str(path))
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must contain lines such as epochs: 3, found a {type(values).__name__}")
    return Layer(str(path), values, is_file=True)


def parse_assignments(assignments: Iterable[str]) -> Layer:
    """Parse the ``KEY=VALUE`` arguments of --set; a key with dots sets a value inside a mapping."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {assignment}: must be KEY=VALUE, for example --set seed=1")
        field, *inner = key.strip().split(".")
        value = parse_yaml(text, f"--set {key}")
        for name in reversed(inner):
            value = {name: value}
        values[field] = _merged(values.get(field), value) if inner else value
    return Layer("--set", values)
