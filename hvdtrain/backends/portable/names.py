"""Portable names: a task's ``state_names``, one name for each tensor, and what is said where they differ.

Both backends use this; neither framework is imported here.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.backends.records import Shapes, StateArrays
from hvdtrain.errors import TaskError

KEPT = "compression"  # before the names of what a reducer keeps from step to step

# First parts of names that only one framework reads: what it needs to continue bit by bit although
# the portable form has no place for it. They may be missing, and the other framework skips them.
PRIVATE = {"torch": "torch/", "tf": "tf/"}

# of what layers of Keras keep other than variables, such as vocabularies
OF_LAYERS = f"{PRIVATE['tf']}layers/"

_SHOWN = 3  # lines of each kind of problem
_NEARLY_ALL = 0.9  # part of the tensors, on both sides, that must fit for names to be proposed
_ALIKE = 0.6  # difflib's ratio from which two names count as close


def is_kept(name: str) -> bool:
    """Return whether a portable name is that of something that a reducer keeps from step to step."""
    return name.startswith(f"{KEPT}/")


def is_private(name: str) -> bool:
    """Return whether only one framework reads this name."""
    return name.startswith(tuple(PRIVATE.values()))


class Renaming:
    """The task's ``state_names`` for one framework: own module paths to portable ones.

    A key stands for a module or for one parameter (its path and role), with dots or slashes. It is
    matched on whole parts of a path; where several match, the longest wins.

    Args:
        framework: "torch" or "tf"; the other one's part is not looked at.
    """

    def __init__(self, task: Any, framework: str) -> None:
        given = getattr(task, "state_names", None)
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise _wrong_form(f"state_names must be a mapping of frameworks to mappings, found {given!r}")
        for part in given:
            if part not in PRIVATE:
                raise _wrong_form(f"state_names has the parts 'torch' and 'tf', found {part!r}")
        names = given.get(framework, {})
        if not isinstance(names, Mapping):
            raise _wrong_form(f"state_names[{framework!r}] must be a mapping, found {names!r}")
        for own, portable in names.items():
            if not (isinstance(own, str) and own and isinstance(portable, str)):
                raise _wrong_form(
                    f"state_names[{framework!r}] maps text to text, found {own!r}: {portable!r}"
                )
        self._framework = framework
        self._names = {own: portable.replace(".", "/").strip("/") for own, portable in names.items()}
        self._keys = {own.replace(".", "/").strip("/"): own for own in names}

    def __call__(self, own: str) -> str:
        """Return the portable name for an own one, both without "model/" in front."""
        parts = own.split("/")
        for length in range(len(parts), 0, -1):
            key = self._key(parts[:length])
            if key is not None:
                name = "/".join(filter(None, [self._names[key], *parts[length:]]))
                if not name:
                    raise _wrong_form(f"state_names[{self._framework!r}] leaves {own} without a name")
                return name
        return own

    def rank(self, own: str) -> tuple[Any, ...]:
        """Order the own names of one tensor: the least of them is its name.

        A name that the task renames goes first, then an embedding's (of the weights that it shares
        with an output layer), then one without a private part, then the shortest path: both
        frameworks choose alike, whatever order the layers are made in.
        """
        parts = own.split("/")
        renamed = any(self._key(parts[:length]) is not None for length in range(1, len(parts) + 1))
        private = any(part.startswith("_") for part in parts)
        return not renamed, parts[-1] != "embeddings", private, len(parts), own

    def check_used(self, own_names: Iterable[str]) -> None:
        """Check that every key stands for something in the model."""
        places: dict[str, str] = {}
        for own in own_names:
            parts = own.split("/")
            for length in range(1, len(parts) + 1):
                path = "/".join(parts[:length])
                places.setdefault(path.replace(".", "/"), path)
        for key, own in self._keys.items():
            if key not in places:
                close = difflib.get_close_matches(key, places, n=3, cutoff=0.4) or sorted(places)[:3]
                raise TaskError(
                    f"state_names[{self._framework!r}] has {own!r}, which the model does not have",
                    f"Closest: {', '.join(places[name] for name in close)}.",
                )

    def _key(self, parts: list[str]) -> str | None:
        return self._keys.get("/".join(parts).replace(".", "/"))


def _wrong_form(problem: str) -> TaskError:
    return TaskError(problem, 'Write it as state_names = {"torch": {"features.0": "conv1"}}.')


def check_unique(names: Iterable[tuple[str, str]]) -> None:
    """Check that no two tensors have the same portable name."""
    known: dict[str, str] = {}
    for portable, own in names:
        if portable in known:
            raise TaskError(
                f"two tensors have the portable name {portable}: {known[portable]} and {own}",
                "Rename a layer, or map one of them with the task's state_names.",
            )
        known[portable] = own


def check_state(
    expected: Shapes, found: StateArrays, framework: str, own_names: Mapping[str, str] | None = None
) -> None:
    """Check that a portable state fits."""
    shapes = {
        name: tuple(array.shape) for name, array in found.items() if not (is_private(name) or is_kept(name))
    }
    if problems := state_problems(expected, shapes):
        raise TaskError(
            "the state does not fit the model:\n  " + "\n  ".join(problems),
            _remedy(expected, shapes, framework, own_names or {}),
        )


def state_problems(expected: Shapes, found: Shapes) -> list[str]:
    """Return where a portable state does not fit, in twelve lines at most."""
    missing, unexpected = _unmatched(expected, found)
    bent = [name for name in expected if name in found and expected[name] != found[name]]
    lines = []
    for name in missing[:_SHOWN]:
        close = _closest(name, expected[name], {other: found[other] for other in unexpected})
        lines.append(
            f"missing: {name} {expected[name]}" + (f"; closest: {', '.join(close)}" if close else "")
        )
    lines += _more(missing, "missing")
    lines += [f"unexpected: {name} {found[name]}" for name in unexpected[:_SHOWN]]
    lines += _more(unexpected, "unexpected")
    lines += [f"misshapen: {name} must be {expected[name]}, is {found[name]}" for name in bent[:_SHOWN]]
    return lines + _more(bent, "misshapen")


def _unmatched(expected: Shapes, found: Shapes) -> tuple[list[str], list[str]]:
    return [n for n in expected if n not in found], [n for n in found if n not in expected]


def _more(names: list[str], kind: str) -> list[str]:
    return [f"{kind}: and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []


def _closest(name: str, shape: tuple[int, ...], others: Shapes) -> list[str]:
    """Return up to two other names that may be meant: same shape and role first, then similar names."""

    def likeness(other: str) -> tuple[bool, float]:
        fits = others[other] == shape and _role(other) == _role(name)
        return fits, difflib.SequenceMatcher(None, _path(name), _path(other)).ratio()

    same_part = [other for other in others if other.partition("/")[0] == name.partition("/")[0]]
    ordered = sorted(same_part, key=likeness, reverse=True)
    return [other for other in ordered if likeness(other)[0] or likeness(other)[1] >= _ALIKE][:2]


def _path(name: str) -> str:
    return name.partition("/")[2]


def _role(name: str) -> str:
    return name.rpartition("/")[2]


def _remedy(expected: Shapes, found: Shapes, framework: str, own_names: Mapping[str, str]) -> str:
    """Return a line of ``state_names`` that makes nearly all names fit; empty if there is none."""
    missing, unexpected = _unmatched(expected, found)
    free = [name for name in unexpected if name.startswith("model/")]
    kept = {own_names.get(name, name).removeprefix("model/") for name in expected if name in found}
    mapping: dict[str, str] = {}
    paired = 0
    for name in missing:
        fitting = {o: found[o] for o in free if found[o] == expected[name] and _role(o) == _role(name)}
        if not name.startswith("model/") or not fitting:
            continue
        chosen = _closest(name, expected[name], fitting)[0]
        free.remove(chosen)
        paired += 1
        own = own_names.get(name, name)
        _add(mapping, kept, own.removeprefix("model/").split("/"), chosen.removeprefix("model/").split("/"))
    wanted = sum(name.startswith("model/") for name in missing)
    # of unrelated models, some layers fit by chance
    if paired < _NEARLY_ALL * max(wanted, paired + len(free)) or not mapping:
        return ""
    entries = ", ".join(f'"{own}": "{portable}"' for own, portable in mapping.items())
    return (
        "If these are the same layers under other names, say so in the task:\n"
        f'    state_names = {{"{framework}": {{{entries}}}}}'
    )


def _add(mapping: dict[str, str], kept: set[str], own: list[str], portable: list[str]) -> None:
    """Add a pair of names by the shortest paths that tell them apart: what both end with is left out."""
    while len(own) > 1 and len(portable) > 1 and own[-1] == portable[-1]:
        path, target = "/".join(own[:-1]), "/".join(portable[:-1])
        if mapping.get(path, target) != target or any(name.startswith(f"{path}/") for name in kept):
            break
        own, portable = own[:-1], portable[:-1]
    mapping["/".join(own)] = "/".join(portable)
