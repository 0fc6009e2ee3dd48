"""Which part of a checkpoint's weights a model takes: patterns of names, and a table of both."""

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hvdtrain.backends.records import Shapes
from hvdtrain.errors import CheckpointError
from hvdtrain.storage.text import some
from hvdtrain.workers.wire_types import travels

ONLY, SKIP = "--init-only", "--init-skip"
_ROWS = 8  # of each kind that a table shows
_SHOWN = 6  # names, or patterns, in a message
REMEDY = f"Leave out what does not fit with {SKIP} PATTERN, or name what does with {ONLY} PATTERN."


@dataclass(frozen=True)
class Choice:
    """Patterns that choose a part of some weights. Without patterns, all are chosen."""

    only: tuple[str, ...] = ()  # if there are some, a name must match one of them
    skip: tuple[str, ...] = ()  # a name must match none of them

    @property
    def is_all(self) -> bool:
        """Whether there are no patterns."""
        return not (self.only or self.skip)

    def reason_against(self, *names: str) -> str:
        """Return why an array of these names is not chosen; empty if it is."""
        for pattern in self.skip:
            if _matches(pattern, names):
                return f"{SKIP} {pattern!r}"
        return f"not in {ONLY}" if self.only and not any(_matches(p, names) for p in self.only) else ""


@travels
@dataclass(frozen=True)
class Selection:
    """What a model takes."""

    names: tuple[str, ...]  # the arrays, by the model's names
    text: str  # a table of what is taken and what is not, and why


def _matches(pattern: str, names: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def select(source: str, expected: Shapes, found: Shapes, choice: Choice) -> Selection:
    """Choose what a model takes of some weights. What the patterns choose must fit exactly."""
    _check_patterns(source, choice, list(dict.fromkeys([*expected, *found])))
    against = {name: choice.reason_against(name) for name in (*expected, *found)}
    taken = [name for name in expected if not against[name] and found.get(name) == expected[name]]
    if misfits := _misfits(expected, found, [name for name in against if not against[name]]):
        lines = _shortened(misfits)
        raise CheckpointError(
            f"{source}: what is chosen of it does not fit the model:\n  " + "\n  ".join(lines),
            REMEDY,
            everywhere=True,
        )
    if not taken:
        given = " and ".join(name for name, all_of in ((ONLY, choice.only), (SKIP, choice.skip)) if all_of)
        raise CheckpointError(
            f"{source}: nothing of it is taken, because of {given}",
            f"The model has, for example, {some(list(expected), _SHOWN)}.",
            everywhere=True,
        )
    return Selection(tuple(taken), _table(expected, found, taken, against))


def _check_patterns(source: str, choice: Choice, names: list[str]) -> None:
    """Check that every pattern matches something."""
    for option, pattern in [*((ONLY, one) for one in choice.only), *((SKIP, one) for one in choice.skip)]:
        if not _matches(pattern, names):
            close = difflib.get_close_matches(pattern, names, n=_SHOWN, cutoff=0.3)
            raise CheckpointError(
                f"{option}: the pattern {pattern!r} matches nothing in the model or in {source}",
                f"There are, for example, {some(close or names, _SHOWN)}; * stands for any text.",
                everywhere=True,
            )


def _misfits(expected: Shapes, found: Shapes, chosen: Collection[str]) -> list[str]:
    """Return what does not fit of what is chosen, as text."""
    lines = []
    for name in chosen:
        if name not in expected:
            lines.append(f"{name} {found[name]}: the model has none")
        elif found.get(name) != expected[name]:
            there = f"there {found[name]}" if name in found else "missing there"
            lines.append(f"{name}: the model's is {expected[name]}, {there}")
    return lines


def _table(expected: Shapes, found: Shapes, taken: Collection[str], against: Mapping[str, str]) -> str:
    """Return what is taken, what keeps its initial values and what of the source is not used."""
    initial, unused = [], []
    for name, reason in against.items():
        if reason and name not in expected:
            unused.append(f"{name} {found[name]}: {reason}")
        elif reason:
            there = "" if found.get(name) == expected[name] else f"; there {found.get(name, 'it is missing')}"
            initial.append(f"{name} {expected[name]}: {reason}{there}")
    numbers, total = (sum(math.prod(expected[name]) for name in part) for part in (taken, expected))
    rows = {"taken": [f"{name} {expected[name]}" for name in taken], "initial": initial, "unused": unused}
    title = f"{len(taken)} of {len(expected)} arrays taken, {numbers:,} of {total:,} numbers"
    lines = [f"  {kind:<8} {line}" for kind, own in rows.items() for line in _shortened(own)]
    return "\n".join([title, *lines])


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _ROWS else [*lines[:_ROWS], f"and {len(lines) - _ROWS} more"]
