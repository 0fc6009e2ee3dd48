"""The files that a data set lies in, on this host or at a URL: finding them, and reading parts of them."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from hvdtrain.errors import DataError
from hvdtrain.storage import urls as object_urls
from hvdtrain.storage.urls import StoreError, is_url, scheme_of

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
    numbers = _RANGE.fullmatch(match[1])
    if numbers:
        width = len(numbers[1])
        parts = [f"{number:0{width}}" for number in range(int(numbers[1]), int(numbers[2]) + 1)]
    else:
        parts = match[1].split(",")
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
        if any(sign in inside for sign in "*?["):
            return sorted(system.unstrip_protocol(found) for found in system.glob(inside))
        if not inside.endswith(suffix) and system.isdir(inside):
            return sorted(system.unstrip_protocol(found) for found in system.glob(f"{inside}/*{suffix}"))
        return [path]
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


def version_of(path: str) -> str:
    """Return a text that changes when a file does: its size and when it was changed, or the store's tag."""
    if is_url(path):
        system, inside = file_system(path)
        return f"{system.size(inside)} {system.ukey(inside)}"
    found = os.stat(path)
    return f"{found.st_size} {found.st_mtime_ns}"


def read_parts(parts: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Return parts of files (path, first byte, size); those of a store are fetched at the same time."""
    found = [b""] * len(parts)
    by_store: dict[str, list[int]] = {}
    for place, (path, _, _) in enumerate(parts):
        by_store.setdefault(scheme_of(path) if is_url(path) else "", []).append(place)
    for store, places in by_store.items():
        paths, starts, sizes = zip(*(parts[place] for place in places), strict=True)
        try:
            if store:
                system, _ = file_system(paths[0])
                ends = [first + size for first, size in zip(starts, sizes, strict=True)]
                inside = [system._strip_protocol(path) for path in paths]
                read = system.cat_ranges(inside, list(starts), ends, on_error="raise")
            else:
                read = [_read_part(*parts[place]) for place in places]
        except OSError as error:
            raise DataError(f"{paths[0]} cannot be read: {error}") from error
        for place, data in zip(places, read, strict=True):
            found[place] = data
    for (path, first, size), data in zip(parts, found, strict=True):
        if len(data) != size:
            raise DataError(f"{path} ends before byte {first + size:,}: it has changed since the job began")
    return found


def _read_part(path: str, first: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(first)
        return file.read(size)
