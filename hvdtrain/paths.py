"""Paths as users write them, with ``~`` and environment variables; and the cache folder."""

import errno
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

from hvdtrain.given_urls import check_is_no_lost_url
from hvdtrain.storage.urls import is_url

_NAME_BYTES, _PATH_BYTES = 255, 4095  # of Linux
_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|(\w+))")


def expand_path(text: str) -> str:
    """Return a path with ``~``, ``~user``, ``$NAME`` and ``${NAME}`` replaced.

    Raises:
        ValueError: If a variable is not set, or there is no such user: the text would be taken for a name;
            or if it is a URL that lost a slash, or a path that the system cannot have.
    """
    if "\0" in text:
        raise ValueError("a path cannot contain a null character")
    check_is_no_lost_url(text)

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
    if not is_url(path):
        _check_is_possible(path)
    return path


def _check_is_possible(path: str) -> None:
    """Check that there can be a file of a path.

    Raises:
        ValueError: If a name in it or all of it is too long, or links in it lead to themselves.
    """
    name = max((os.fsencode(part) for part in path.split("/")), key=len)
    if len(name) > _NAME_BYTES:
        raise ValueError(f"a name in a path has at most {_NAME_BYTES} bytes, this one has {len(name):,}")
    with suppress(FileNotFoundError):  # the working directory was removed
        path = os.path.abspath(path)
    if (size_bytes := len(os.fsencode(path))) > _PATH_BYTES:
        raise ValueError(f"a path has at most {_PATH_BYTES:,} bytes, this one has {size_bytes:,}")
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise ValueError(f"{os.strerror(error.errno).lower()}: there can be no such file") from None


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


def run_folder(run_dir: str | None) -> Path:
    """Return where a run is written on this host: its directory, or the working copy of one at a URL.

    Args:
        run_dir: the config's field; None if it is not given.
    """
    if run_dir is None or not is_url(run_dir):
        return Path(run_dir or "")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.rpartition("/")[2])[:60].strip(".-") or "run"
    return cache_folder().absolute() / "runs" / f"{name}-{hashlib.sha256(run_dir.encode()).hexdigest()[:12]}"
