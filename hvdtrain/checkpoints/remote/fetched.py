"""Checkpoints at URLs, for those who only read them: copies that are read as what lies on a disk."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.checkpoints import verification
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.remote.stored_checkpoints import fetch, manifest_of, names_in
from hvdtrain.checkpoints.storage import FOLDER, MANIFEST_FILE, NAME, Checkpoint
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.storage.files import cache_folder
from hvdtrain.storage.text import name_place
from hvdtrain.storage.urls import (
    MissingObjectError,
    StoreError,
    entries,
    is_url,
    join,
    name,
    shown,
)

_folders: list[tempfile.TemporaryDirectory[str]] = []  # which are removed at the end of the process
_LISTINGS = 3  # if checkpoints are removed while they are fetched
_OLD_SECONDS = 24 * 3600.0  # after which the copies of a process that was killed are removed


def locate(place: Path | str) -> Checkpoint:
    """Find the checkpoint that a user names by a path or a URL, verified; of a run its newest good one."""
    if not is_url(place):
        return verification.locate(Path(place))
    return _newest(str(place), is_fetched=True)


def find_unverified(url: str) -> Checkpoint:
    """Return the checkpoint at a URL, or the newest one of the run there, by its manifest alone."""
    return _newest(url, is_fetched=False)


def _newest(url: str, is_fetched: bool) -> Checkpoint:
    """Return the first checkpoint there that can be read."""
    with reading(url):
        for _ in range(_LISTINGS):
            problems: list[str] = []
            is_removed = False  # by its run, meanwhile
            for one in _candidates(url):
                try:
                    if (manifest := manifest_of(one)) is not None:
                        path = _place(one)
                        if is_fetched:
                            fetch(one, path.parent)
                        return Checkpoint(path, manifest, tuple(problems))
                except CorruptCheckpoint as corruption:
                    is_removed |= not _is_whole(one)
                    problems.append(f"{name(one)}: {corruption}")
            if not is_removed:
                break
    raise CheckpointError(
        "; ".join([f"no {'good ' if problems else ''}checkpoint in {shown(url)}", *problems[:4]]),
        "Give the URL of a run directory, or of a directory such as RUN_DIR/checkpoints/step-00000120.",
    )


def manifests_in(url: str) -> dict[str, Manifest]:
    """Return the manifests of the checkpoints of a run at a URL, by URL, the newest last; no damaged ones."""
    found: dict[str, Manifest | None] = {}
    with reading(url):
        for one in reversed(_candidates(url)):
            with suppress(CorruptCheckpoint, EnvironmentFault):
                found[one] = manifest_of(one)
    return {one: manifest for one, manifest in found.items() if manifest}


def _candidates(url: str) -> list[str]:
    """Return the URL of the checkpoint that is named, or of those of a run, the newest first."""
    if NAME.fullmatch(name(url)) or _is_whole(url):
        return [url]
    for folder in (join(url, FOLDER), url):
        if names := names_in(folder):
            return [join(folder, one) for one in reversed(names)]
    return []


def _is_whole(url: str) -> bool:
    return any(name(one.url) == MANIFEST_FILE for one in entries(url))


def _place(url: str) -> Path:
    """Return a new path for a copy, whose folder exists, and which texts name by the URL."""
    place = cache_folder().absolute() / "reading"
    place.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        for old in place.iterdir():  # of processes that were killed
            if time.time() - old.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True)
    _folders.append(folder)
    path = Path(folder.name) / (name(url).strip(".") or "run")
    name_place(path, shown(url))
    return path


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Return a context in which what a store or this host's disk refuses is the environment's fault."""
    try:
        yield
    except StoreError as error:
        is_missing = isinstance(error, MissingObjectError)
        raise (CheckpointError if is_missing else EnvironmentFault)(error.problem, error.remedy) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{shown(url)} cannot be fetched into {cache_folder()}: {error.strerror or error}",
            "Free space there, or name another folder with HVDTRAIN_CACHE.",
        ) from None
