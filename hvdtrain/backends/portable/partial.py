"""Which part of a checkpoint's weights a model takes: patterns of names, and a table of both."""

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hvdtrain.backends.portable.names import state_problems
from hvdtrain.backends.records import Shapes
from hvdtrain.errors import CheckpointError
from hvdtrain.storage.text import some

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


def _matches(pattern: str, names: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def select(source: str, expected: Shapes, found: Shapes, choice: Choice) -> tuple[list[str], str]:
    """Return what a model takes of some weights, which must fit exactly, and a table of why."""
    _check_patterns(source, choice, list(dict.fromkeys([*expected, *found])))
    against = {name: choice.reason_against(name) for name in (*expected, *found)}
    taken = [name for name in expected if not against[name] and found.get(name) == expected[name]]
    chosen = [{n: all_of[n] for n in all_of if not against[n]} for all_of in (expected, found)]
    if problems := state_problems(*chosen):
        problem = f"{source}: what is chosen of it does not fit the model:\n  "
        raise CheckpointError(problem + "\n  ".join(problems), REMEDY, everywhere=True)
    if not taken:
        given = " and ".join(name for name, all_of in ((ONLY, choice.only), (SKIP, choice.skip)) if all_of)
        raise CheckpointError(
            f"{source}: nothing of it is taken, because of {given}",
            f"The model has, for example, {some(list(expected), _SHOWN)}.",
            everywhere=True,
        )
    return taken, _table(expected, found, taken, against)


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


def _table(expected: Shapes, found: Shapes, taken: Collection[str], against: Mapping[str, str]) -> str:
    """Return what is taken, what keeps its initial values and what of the source is not used."""
    rows: dict[str, list[str]] = {"taken": [f"{name} {expected[name]}" for name in taken]}
    for name, reason in against.items():
        if reason and name not in expected:
            rows.setdefault("unused", []).append(f"{name} {found[name]}: {reason}")
        elif reason:
            there = "" if found.get(name) == expected[name] else f"; there {found.get(name, 'it is missing')}"
            rows.setdefault("initial", []).append(f"{name} {expected[name]}: {reason}{there}")
    numbers, total = (sum(math.prod(expected[name]) for name in part) for part in (taken, expected))
    lines = [f"{len(taken)} of {len(expected)} arrays taken, {numbers:,} of {total:,} numbers"]
    for kind, of_kind in rows.items():
        more = [f"and {len(of_kind) - _ROWS} more"] if len(of_kind) > _ROWS else []
        lines += [f"  {kind:<8} {line}" for line in of_kind[:_ROWS] + more]
    return "\n".join(lines)
