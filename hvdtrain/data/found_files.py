"""Files that a user names by paths, patterns or URLs: finding and opening them."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from hvdtrain.errors import DataError
from hvdtrain.storage import urls as object_urls
from hvdtrain.storage.urls import StoreError, is_url

Paths = str | Path | Sequence[str | Path]

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def find_files(paths: Paths, suffix: str) -> list[str]:
    """Return the files that a user names, each with its whole path or URL."""
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    found = [file for one in named for text in expand_braces(str(one)) for file in _matches(text, suffix)]
    if not found:
        raise DataError(f"there are no {suffix} files at {', '.join(map(str, named)) or 'an empty list'}")
    if len(set(found)) < len(found):
        twice = next(file for place, file in enumerate(found) if file in found[:place])
        raise DataError(f"{twice} is named twice", "Each sample comes once per epoch: name each file once.")
    return found


def expand_braces(text: str) -> list[str]:
    """Return the texts that one with braces stands for: ``a-{00..02}.tar``, ``{train,extra}.tar``."""
    match = _BRACES.search(text)
    if match is None:
        return [text]
    parts = match[1].split(",")
    if numbers := _RANGE.fullmatch(match[1]):
        width = len(numbers[1])
        parts = [f"{number:0{width}}" for number in range(int(numbers[1]), int(numbers[2]) + 1)]
    before, after = text[: match.start()], text[match.end() :]
    return [one for part in parts for one in expand_braces(f"{before}{part}{after}")]


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    try:
        return object_urls.file_system(url)
    except StoreError as error:
        raise DataError(error.problem, error.remedy) from None


def _matches(path: str, suffix: str) -> list[str]:
    """Return the files that a path or URL without braces names, sorted."""
    if is_url(path):
        system, inside = file_system(path)
        if not any(sign in inside for sign in "*?["):
            if inside.endswith(suffix) or not system.isdir(inside):
                return [path]
            inside = f"{inside}/*{suffix}"
        return sorted(system.unstrip_protocol(found) for found in system.glob(inside))
    path = os.path.expanduser(path)
    if os.path.isdir(path) and not path.endswith(suffix):
        path = os.path.join(glob.escape(path), f"*{suffix}")
    if any(sign in path for sign in "*?[") and not os.path.exists(path):
        return [os.path.abspath(found) for found in sorted(glob.glob(path, recursive=True))]
    if not os.path.isfile(path):
        raise DataError(f"{path} does not exist (looked in {os.getcwd()})")
    return [os.path.abspath(path)]


def open_file(path: str) -> BinaryIO:
    """Return a file or an object of a store, opened to be read."""
    if not is_url(path):
        return open(path, "rb")
    system, inside = file_system(path)
    return cast(BinaryIO, system.open(inside, "rb"))
