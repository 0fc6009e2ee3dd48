"""Nested mappings, tuples and lists with tensors in them: the arguments and the outputs of models."""

import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

KeyPath = tuple[str | int, ...]


class Tensors(NamedTuple):
    """What is done with a framework's tensors."""

    is_tensor: Callable[[Any], bool]  # returns whether a value is one
    to_numpy: Callable[[Any], Any]  # returns one as an array
    concatenate: Callable[[list[Any], int], Any]  # joins a list of them along an axis


def named_outputs(
    outputs: Any, tensors: Tensors, taken: Sequence[str] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the tensors in a model's outputs by name, and what else there is, as text.

    A single tensor is named "outputs"; others have the names of their keys or fields, or numbers.
    """
    named: dict[str, Any] = {}
    ignored = []
    for path, leaf in leaves(_plain(outputs), tensors.is_tensor):
        keys = path if path and isinstance(path[0], str) else ("outputs", *path)
        if tensors.is_tensor(leaf):
            name = _identifier(keys)
            while name in named or name in taken:
                name += "_output" if name in taken else "_"
            named[name] = leaf
        elif leaf is not None:
            ignored.append(f"{'.'.join(map(str, path))} (a {type(leaf).__name__})")
    return named, tuple(ignored)


def leaves(tree: Any, is_leaf: Callable[[Any], bool], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the leaves of nested mappings, tuples and lists."""
    if is_leaf(tree) or not isinstance(tree, (Mapping, tuple, list)):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
        yield from leaves(value, is_leaf, (*path, key if isinstance(key, int) else str(key)))


def mapped(tree: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    """Return nested mappings, tuples and lists with changed leaves; mappings become dicts."""
    if is_leaf(tree) or not isinstance(tree, (Mapping, tuple, list)):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(value, change, is_leaf) for key, value in tree.items()}
    values = [mapped(value, change, is_leaf) for value in tree]
    if hasattr(tree, "_fields"):
        return type(tree)(*values)
    return tuple(values) if isinstance(tree, tuple) else values


def copied(tree: Any) -> Any:
    """Return a copy of nested mappings; what is in them stays."""
    return {key: copied(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _plain(outputs: Any) -> Any:
    """Return a model's outputs with named fields as a mapping."""
    if isinstance(outputs, Mapping):
        return outputs
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return dict(zip(outputs._fields, outputs, strict=True))
    return outputs


def unique_names(paths: Sequence[KeyPath]) -> list[str]:
    """Return a name for each path: its last key, or all of it if that is no name or not the only one."""
    last = [str(path[-1]) if isinstance(path[-1], str) else _identifier(path) for path in paths]
    names: list[str] = []
    for path, key in zip(paths, last, strict=True):
        name = _identifier((key,)) if last.count(key) == 1 else _identifier(path)
        while name in names:
            name += "_"
        names.append(name)
    return names


def _identifier(path: KeyPath) -> str:
    name = re.sub(r"\W", "_", "_".join(map(str, path)), flags=re.ASCII)
    return f"_{name}" if not name.isidentifier() else f"{name}_" if _is_reserved(name) else name


def _is_reserved(name: str) -> bool:
    return keyword.iskeyword(name) or name == "self"


def dotted(path: KeyPath) -> str:
    """Return a path for a message."""
    return repr(".".join(map(str, path)))
