"""Paths as users write them, with ``~`` and environment variables; and the cache folder."""

import os
import re
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|(\w+))")


def expand_path(text: str) -> str:
    """Return a path with ``~``, ``~user``, ``$NAME`` and ``${NAME}`` replaced.

    Raises:
        ValueError: If a variable is not set, or there is no such user: the text would be taken for a name.
    """
    if "\0" in text:
        raise ValueError("a path cannot contain a null character")

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2] or ""
        value = os.environ.get(name)
        if not value:
            raise ValueError(f"the environment variable {name or match[0]} is not set")
        return value

    expanded = _VARIABLE.sub(value_of, text)
    path = os.path.expanduser(expanded)
    if path.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"there is no home directory {user}; write ./{user} for a file of that name")
    return path


def expand_task(spec: str) -> str:
    """Return a task's spec with its path expanded, if it names a file.

    Raises:
        ValueError: as ``expand_path`` does.
    """
    place, colon, name = spec.rpartition(":")
    if colon and place.endswith(".py"):
        return f"{expand_path(place)}:{name}"
    return expand_path(spec) if spec.endswith(".py") else spec


def cache_folder() -> Path:
    """Return the folder for what can be made again: ``$HVDTRAIN_CACHE``, or ``~/.cache/hvdtrain``."""
    if cache := os.environ.get("HVDTRAIN_CACHE"):
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain"
