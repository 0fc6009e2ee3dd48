"""Files that somebody else may have made: pipes and devices, which may never end, are refused."""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from hvdtrain.errors import EnvironmentFault
from hvdtrain.storage.urls import PASSWORD, TOKEN, is_url, scheme_of, shown

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.*[^/].*", re.DOTALL | re.IGNORECASE)
_ONE_SLASH = re.compile(r"(s3a?|gs|gcs|az|abfss?|https?|memory|file):/(?!/).+", re.DOTALL | re.IGNORECASE)


def check_url(url: str) -> str:
    """Return the URL of a folder or an object as a user gives it, without slashes at its end."""
    if not _URL.fullmatch(url) or "::" in url:
        raise ValueError(f"{shown(url)} is no URL such as s3://bucket/folder")
    for kind, pattern in (("password", PASSWORD), ("token", TOKEN)):
        if pattern.search(url):
            raise ValueError(
                f"{shown(url)} has a {kind} in it, which would be written to files; "
                "configure it in the store's client"
            )
    _, mark, inside = url.rstrip("/").partition("://")
    return f"{scheme_of(url)}{mark}{inside}"


_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|(\w+))")


def expand_path(text: str) -> str:
    """Return a path with ``~``, ``~user``, ``$NAME`` and ``${NAME}`` replaced."""
    if "\0" in text:
        raise ValueError("a path cannot contain a null character")
    if _ONE_SLASH.fullmatch(text):  # what ``pathlib.Path`` makes of a URL
        scheme, _, inside = text.partition(":/")
        raise ValueError(
            f"a URL has two slashes after its colon: write {shown(f'{scheme}://{inside}')}, in Python as a "
            f"str, because a Path makes one slash of two; for a folder named {scheme}: write ./{shown(text)}"
        )

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
    for place in () if is_url(path) else (path, *Path(path).parts):  # names below missing folders, too
        try:
            os.stat(place, follow_symlinks=place == path)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
                raise ValueError(f"{os.strerror(error.errno).lower()}: there can be no such file") from None
    return path


def expand_task(spec: str) -> str:
    """Return a task's spec with its path expanded, if it names a file."""
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
    """Return where a run is written on this host: its directory, or the working copy of one at a URL."""
    if run_dir is None or not is_url(run_dir):
        return Path(run_dir or "")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.rpartition("/")[2])[:60].strip(".-") or "run"
    return cache_folder().absolute() / "runs" / f"{name}-{hashlib.sha256(run_dir.encode()).hexdigest()[:12]}"


class NotAFileError(OSError):
    """A path is a pipe or a device, or a file that is too large for what it should hold."""


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes."""
    return _size_of(path, path.stat())


def open_regular(path: Path, follow: bool = True) -> BufferedReader:
    """Open a file for reading."""
    if not follow and path.is_symlink():
        raise not_followed(path)
    regular_size(path)  # before it is opened: a device may do something then
    # it may have been replaced since: a pipe is not waited for
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        _size_of(path, os.fstat(file))
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a file."""
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
        size = max(len(content), os.fstat(file.fileno()).st_size)
    if size > limit_bytes:
        raise NotAFileError(f"{path.name} has {size:,} bytes; at most {limit_bytes:,} are expected")
    return content


def check_link(folder: Path, root: Path) -> None:
    """Check that a folder in another one is no symbolic link that leads out of it."""
    if folder.is_symlink() and not folder.resolve().is_relative_to(root.resolve()):
        raise NotAFileError(
            errno.ELOOP, f"it is a link that leads out of {root}, which is not followed", str(folder)
        )


def not_followed(path: Path) -> NotAFileError:
    """Return the error that says of a symbolic link that it is not followed."""
    return NotAFileError(errno.ELOOP, "it is a link, which is not followed", str(path))


def _size_of(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(f"{path.name} is not a regular file")
    return status.st_size


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return what a line of a log holds; None if it was cut, or is not a JSON object."""
    try:
        found = json.loads(line.decode())  # of bytes it would look for the encoding first
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def exchange_folder(shared: bool) -> Iterator[Path]:
    """Return a context with a folder for what jobs are to do and what they found."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".hvdtrain-exchange-", dir=os.getcwd() if shared else None))
    except OSError as error:
        place = "the working directory" if shared else "the folder for temporary files"
        raise EnvironmentFault(
            f"cannot make a folder in {place}: {error.strerror}",
            "Work in a folder that can be written and that all hosts share." if shared else "Set TMPDIR.",
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
