"""Nested batches under flat names: ``{"inputs": {"a": x}}`` has the name "inputs/a", a tuple "inputs/0"."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hvdtrain.errors import DataError

SEPARATOR = "/"
# keys that a loss compares with; the first that a batch has becomes its "targets"
TARGETS = ("targets", "labels", "label")

Nest = Callable[[Mapping[str, Any]], dict[str, Any]]


def flatten(item: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a sample or a batch with flat names.

    A value that is a mapping, or a tuple with an array in it, gives one name for each of its parts. A
    tuple of numbers and a list are arrays.

    Raises:
        DataError: If a value is nested twice, or two parts would have the same name.
    """
    result: dict[str, Any] = {}
    for key, value in item.items():
        parts = {str(key): value} if not is_nested(value) else _parts(str(key), value)
        for name, part in parts.items():
            if name in result:
                raise DataError(f"two parts of a sample have the same name {name!r}", "Rename one of them.")
            result[name] = part
    return result


def is_nested(value: Any) -> bool:
    """Return whether a value of a sample or a batch has several parts."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, tuple) and any(isinstance(p, Mapping) or has_axes(p) for p in value)


def has_axes(value: Any) -> bool:
    """Return whether a value is an array or a tensor with at least one axis."""
    return hasattr(value, "shape") and np.ndim(value) > 0


def nesting(names: Iterable[str]) -> Nest | None:
    """Return a function that nests batches with these flat names, or None if nothing is nested.

    Raises:
        DataError: If a name stands for an array and for several parts.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        top, _, part = name.partition(SEPARATOR)
        groups.setdefault(top, {})[part] = name
    for top, parts in groups.items():
        if "" in parts and len(parts) > 1:
            raise DataError(f"a batch has {top!r} and parts of it: {sorted(parts.values())}")
    if all("" in parts for parts in groups.values()):
        return None
    return lambda batch: {top: _joined(parts, batch) for top, parts in groups.items()}


def _parts(key: str, value: Any) -> dict[str, Any]:
    """Return the parts of a nested value by their flat names."""
    keys = list(value) if isinstance(value, Mapping) else range(len(value))
    values = value.values() if isinstance(value, Mapping) else value
    if not keys:
        raise DataError(f"{key!r} is empty: a {type(value).__name__} without a part")
    if isinstance(value, Mapping) and any(str(k).isdigit() or SEPARATOR in str(k) for k in keys):
        raise DataError(
            f"the keys of {key!r} are {[str(k) for k in keys]}; they may not be whole numbers or contain "
            f"{SEPARATOR!r}",
            "Rename them, or give a tuple.",
        )
    if any(is_nested(part) for part in values):
        raise DataError(
            f"{key!r} is nested twice; a sample may hold mappings or tuples of arrays, but no deeper ones",
            "Move its parts one level up.",
        )
    return {f"{key}{SEPARATOR}{k}": part for k, part in zip(keys, values, strict=True)}


def _joined(parts: Mapping[str, str], batch: Mapping[str, Any]) -> Any:
    if "" in parts:
        return batch[parts[""]]
    if all(part.isdigit() for part in parts):
        return tuple(batch[parts[part]] for part in sorted(parts, key=int))
    return {part: batch[name] for part, name in parts.items()}
