"""Portable names: a task's ``state_names``, one name for each tensor, and what is said where they differ."""

import difflib
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from hvdtrain.backends.records import Shapes, StateArrays
from hvdtrain.errors import CheckpointError, TaskError

KEPT = "compression"  # before the names of what a reducer keeps from step to step
# First parts of names that only one framework reads: what it needs to continue bit by bit although
# the portable form has no place for it. They may be missing, and the other framework skips them.
PRIVATE = {"torch": "torch/", "tf": "tf/"}
# of what layers of Keras keep other than variables, such as vocabularies
OF_LAYERS = f"{PRIVATE['tf']}layers/"
_SHOWN = 3  # lines of each kind of problem
_ALIKE = 0.7  # difflib's ratio from which two names count as close


def is_kept(name: str) -> bool:
    """Return whether a portable name is that of something that a reducer keeps from step to step."""
    return name.startswith(f"{KEPT}/")


def is_private(name: str) -> bool:
    """Return whether only one framework reads this name."""
    return name.startswith(tuple(PRIVATE.values()))


class Renaming:
    """The task's ``state_names`` for one framework, "torch" or "tf": own module paths to portable ones.

    A key is matched on whole parts of a path; where several match, the longest wins.
    """

    def __init__(self, task: Any, framework: str) -> None:
        given = getattr(task, "state_names", None) or {}
        names = given.get(framework, {}) if isinstance(given, Mapping) else {}
        if (
            not (isinstance(given, Mapping) and isinstance(names, Mapping))
            or given.keys() - PRIVATE.keys()
            or not all(isinstance(own, str) and own and isinstance(to, str) for own, to in names.items())
        ):
            form = "state_names maps 'torch' and 'tf' to mappings of text to text"
            raise _wrong_form(f"{form}, found {names if names else given!r}")
        self._framework = framework
        self._names = {own: portable.replace(".", "/").strip("/") for own, portable in names.items()}
        self._keys = {own.replace(".", "/").strip("/"): own for own in names}

    def __call__(self, own: str) -> str:
        """Return the portable name for an own one, both without "model/" in front."""
        for path in reversed(_paths(own)):
            if (key := self._keys.get(path.replace(".", "/"))) is not None:
                name = f"{self._names[key]}{own[len(path) :]}".strip("/")
                if not name:
                    raise _wrong_form(f"state_names[{self._framework!r}] leaves {own} without a name")
                return name
        return own

    def rank(self, own: str) -> tuple[Any, ...]:
        """Order the own names of one tensor: the least of them is its name, in both frameworks alike."""
        parts = own.split("/")
        renamed = any(path.replace(".", "/") in self._keys for path in _paths(own))
        private = any(part.startswith("_") for part in parts)
        # an embedding shares its weights with an output layer
        return not renamed, parts[-1] != "embeddings", private, len(parts), own

    def check_used(self, own_names: Iterable[str]) -> None:
        """Check that every key stands for something in the model."""
        places: dict[str, str] = {}
        for path in (path for own in own_names for path in _paths(own)):
            places.setdefault(path.replace(".", "/"), path)
        for key, own in self._keys.items():
            if key not in places:
                close = difflib.get_close_matches(key, places, n=3, cutoff=0.4) or sorted(places)[:3]
                raise TaskError(
                    f"state_names[{self._framework!r}] has {own!r}, which the model does not have",
                    f"Closest: {', '.join(places[name] for name in close)}.",
                )


def _paths(own: str) -> list[str]:
    """Return a name and what it is below, the outermost first: "a", "a/b"."""
    return list(accumulate(own.split("/"), "{}/{}".format))


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


def check_state(expected: Shapes, found: StateArrays, framework: str) -> None:
    """Check that a portable state fits."""
    shapes = {n: tuple(array.shape) for n, array in found.items() if not (is_private(n) or is_kept(n))}
    if problems := state_problems(expected, shapes):
        raise TaskError(
            "the state does not fit the model:\n  " + "\n  ".join(problems),
            f'Names of the same layers that differ are mapped in the task: state_names = {{"{framework}": '
            '{"own/path": "other/path"}}.',
        )


def state_problems(expected: Shapes, found: Shapes) -> list[str]:
    """Return where a portable state does not fit, in twelve lines at most."""
    unexpected = {name: shape for name, shape in found.items() if name not in expected}
    missing: list[str] = []
    for name in (name for name in expected if name not in found):
        close = _closest(name, expected[name], unexpected) if len(missing) < _SHOWN else []
        missing.append(f"{name} {expected[name]}" + (f"; closest: {', '.join(close)}" if close else ""))
    bent = [name for name in expected if name in found and expected[name] != found[name]]
    kinds = {
        "missing": missing,
        "unexpected": [f"{name} {shape}" for name, shape in unexpected.items()],
        "misshapen": [f"{name} must be {expected[name]}, is {found[name]}" for name in bent],
    }
    lines = []
    for kind, of_kind in kinds.items():
        more = [f"and {len(of_kind) - _SHOWN} more"] if len(of_kind) > _SHOWN else []
        lines += [f"{kind}: {line}" for line in of_kind[:_SHOWN] + more]
    return lines


def _closest(name: str, shape: tuple[int, ...], others: Shapes) -> list[str]:
    """Return up to two other names that may be meant: same shape and role first, then similar names."""
    part, mark, _ = name.partition("/")  # such as "model"; a file's own name has none
    near = [other for other in others if not mark or other.startswith(f"{part}/")]
    role = name.rpartition("/")[2]
    same = [other for other in near if others[other] == shape and other.rpartition("/")[2] == role]
    return list(dict.fromkeys(same + difflib.get_close_matches(name, near, 2, _ALIKE)))[:2]


def check_fit(path: Path, expected: Shapes, found: Shapes) -> None:
    """Check that a weights file holds what a model needs, no more and no less."""
    if problems := state_problems(expected, found):
        raise CheckpointError(
            f"{path} does not fit the model:\n  " + "\n  ".join(problems),
            "Rename the file's weights, or give the task the model that they were made by; --init-skip then "
            "takes a part of the checkpoint.",
        )
