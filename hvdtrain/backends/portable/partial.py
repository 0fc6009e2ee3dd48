"""Which part of a checkpoint's or a file's weights a model takes: patterns of names, and a table of both."""

import difflib
import glob
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from hvdtrain.backends.records import Choice, Shapes, matches
from hvdtrain.errors import CheckpointError
from hvdtrain.storage.text import some
from hvdtrain.workers.wire_types import travels

_ROWS = 8  # of each kind that a table shows
_SHOWN = 6  # names, or patterns, in a message


@travels
@dataclass(frozen=True)
class Selection:
    """What a model takes."""

    names: tuple[str, ...]  # the arrays, by the model's names
    text: str  # a table of what is taken and what is not, and why


def select(
    source: str,
    expected: Shapes,
    found: Shapes,
    choice: Choice,
    other_names: Mapping[str, Collection[str]] | None = None,
) -> Selection:
    """Choose what a model takes of some weights. What the patterns choose must fit exactly."""
    names = _Names(other_names or {})
    _check_patterns(source, choice, names.all_of([*expected, *found]))
    against = {name: choice.reason_against(names.of(name)) for name in (*expected, *found)}
    misfits = _misfits(expected, found, names, lambda name: not against[name])
    taken = [name for name in expected if not against[name] and found.get(name) == expected[name]]
    if misfits:
        lines = _shortened(list(misfits.values()))
        raise CheckpointError(
            f"{source}: what is chosen of it does not fit the model:\n  " + "\n  ".join(lines),
            _remedy(misfits, taken, choice, names),
            everywhere=True,
        )
    if not taken:
        raise CheckpointError(
            f"{source}: nothing of it is taken, because of {choice.given}",
            f"The model has, for example, {some(list(expected), _SHOWN)}.",
            everywhere=True,
        )
    return Selection(tuple(taken), _table(expected, found, taken, against, names))


def remedy_for_misfits(
    expected: Shapes,
    found: Shapes,
    choice: Choice,
    other_names: Mapping[str, Collection[str]] | None = None,
) -> str:
    """Return which options take what fits, if all was to be taken; empty if all fits or nothing does."""
    names = _Names(other_names or {})
    misfits = _misfits(expected, found, names, lambda _: True)
    taken = [name for name in expected if found.get(name) == expected[name]]
    return _remedy(misfits, taken, choice, names)


class _Names:
    """The names of each array: its own and further ones."""

    def __init__(self, others: Mapping[str, Collection[str]]) -> None:
        self._others = others

    def of(self, name: str) -> list[str]:
        return [name, *self._others.get(name, ())]

    def all_of(self, names: Iterable[str]) -> list[str]:
        return [one for name in names for one in self.of(name)]

    def label(self, name: str) -> str:
        return " = ".join(self.of(name))


def _check_patterns(source: str, choice: Choice, names: list[str]) -> None:
    """Check that every pattern matches something."""
    for option, patterns in zip(choice.options, (choice.only, choice.skip), strict=True):
        for pattern in patterns:
            if not matches(pattern, names):
                names = list(dict.fromkeys(names))
                close = difflib.get_close_matches(pattern, names, n=_SHOWN, cutoff=0.3)
                raise CheckpointError(
                    f"{option}: the pattern {pattern!r} matches nothing in the model or in {source}",
                    f"There are, for example, {some(close or names, _SHOWN)}; * stands for any text.",
                    everywhere=True,
                )


def _misfits(expected: Shapes, found: Shapes, names: _Names, chosen: Callable[[str], bool]) -> dict[str, str]:
    """Return what does not fit of what is chosen, as text, by name."""
    lines = {}
    for name in expected:
        if chosen(name) and found.get(name) != expected[name]:
            there = f"there {found[name]}" if name in found else "missing there"
            lines[name] = f"{names.label(name)}: the model's is {expected[name]}, {there}"
    for name in found:
        if chosen(name) and name not in expected:
            lines[name] = f"{names.label(name)} {found[name]}: the model has none"
    return lines


def _remedy(misfits: Collection[str], taken: Iterable[str], choice: Choice, names: _Names) -> str:
    """Return the options that leave out what does not fit; their patterns match nothing that is taken."""
    good = names.all_of(taken)
    if not good or not misfits:
        return ""
    patterns: dict[str, None] = {}
    for name in misfits:
        if not any(matches(pattern, names.of(name)) for pattern in patterns):
            patterns[_pattern_for(names.of(name)[-1], good)] = None
    option = choice.options[1]
    if len(patterns) > _SHOWN:
        return (
            f"Leave out what does not fit with {option} PATTERN, or name what does with {choice.options[0]}."
        )
    return "To take the rest, add: " + " ".join(f"{option} '{pattern}'" for pattern in patterns)


def _pattern_for(name: str, good: Collection[str]) -> str:
    """Return a pattern: the shortest prefix of a name that no good name has, or the name itself."""
    for end in re.finditer(r"[/.]", name):
        prefix = name[: end.end()]
        if not any(other.startswith(prefix) for other in good):
            return f"{glob.escape(prefix)}*"
    return glob.escape(name)


def _table(
    expected: Shapes, found: Shapes, taken: Collection[str], against: Mapping[str, str], names: _Names
) -> str:
    """Return what is taken, what keeps its initial values and what of the source is not used."""
    initial, unused = [], []
    for name, reason in against.items():
        if not reason:
            continue
        if name not in expected:
            unused.append(f"{names.label(name)} {found[name]}: {reason}")
            continue
        there = "" if found.get(name) == expected[name] else f"; there {found.get(name, 'it is missing')}"
        initial.append(f"{names.label(name)} {expected[name]}: {reason}{there}")
    numbers, total = (sum(math.prod(expected[name]) for name in part) for part in (taken, expected))
    rows = {
        "taken": [f"{names.label(name)} {expected[name]}" for name in taken],
        "initial": initial,
        "unused": unused,
    }
    title = f"{len(taken)} of {len(expected)} arrays taken, {numbers:,} of {total:,} numbers"
    lines = [f"  {kind:<8} {line}" for kind, own in rows.items() for line in _shortened(own)]
    return "\n".join([title, *lines])


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _ROWS else [*lines[:_ROWS], f"and {len(lines) - _ROWS} more"]
