"""Patterns that choose a part of some weights by name."""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Choice:
    """Patterns that choose a part of some weights. Without patterns, all are chosen.

    Args:
        only: if there are some, a name must match one of them.
        skip: a name must match none of them.
        options: the names of the options that they come from.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    options: tuple[str, str] = ("--init-only", "--init-skip")

    @property
    def is_all(self) -> bool:
        """Whether there are no patterns."""
        return not (self.only or self.skip)

    @property
    def given(self) -> str:
        """The options that give patterns, in words."""
        patterns = zip(self.options, (self.only, self.skip), strict=True)
        return " and ".join(option for option, given in patterns if given)

    def reason_against(self, names: Collection[str]) -> str:
        """Return why an array of these names is not chosen; empty if it is."""
        for pattern in self.skip:
            if matches(pattern, names):
                return f"{self.options[1]} {pattern!r}"
        if self.only and not any(matches(pattern, names) for pattern in self.only):
            return f"not in {self.options[0]}"
        return ""


ALL_WEIGHTS = Choice()


def matches(pattern: str, names: Collection[str]) -> bool:
    """Return whether a pattern matches one of an array's names."""
    return any(fnmatchcase(name, pattern) for name in names)
