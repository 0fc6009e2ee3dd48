"""Patterns that choose a part of some weights by name."""

import atexit
import gc
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from pathlib import Path
from types import ModuleType


@contextmanager
def quick_imports(postponed: Collection[str]) -> Iterator[None]:
    """Return a context in which the imports of a framework take less time.

    Garbage is not collected meanwhile: thousands of modules make many objects and hardly any garbage, and
    each collection would look through all of them again. In a process of the command line, later
    collections leave out what is there at the end of the imports. A script or a notebook has objects of
    its own, which may become garbage, and keeps Python's usual collections.
    """
    collects, finder, modules = gc.isenabled(), _Postponing(postponed), len(sys.modules)
    gc.disable()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if len(sys.modules) > modules and _is_command(sys.argv[0]):
            gc.freeze()
            atexit.register(_free_triton)
        if collects:
            gc.enable()


def _free_triton() -> None:
    """Free objects of Triton at the end of this process: since 3.9 it reports each one that is left."""
    version = getattr(sys.modules.get("triton"), "__version__", "0.0")
    if tuple(int(part) for part in version.split(".")[:2]) >= (3, 9):
        gc.unfreeze()  # not without need: looking through all objects takes a second


def _is_command(program: str) -> bool:
    """Return whether a process whose ``sys.argv`` starts with this program runs a command of hvdtrain."""
    path = Path(program)
    return path.name == "hvdtrain" or path.parts[-2:] == ("hvdtrain", "__main__.py")


class _Postponing:
    """Finds the modules that are postponed, as Python does; nothing else."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that is postponed, with a loader that waits for its first use."""
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


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
        """The options that give patterns, as text."""
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
