"""Runs and checkpoints at URLs, for those who only read them: copies that are read as what lies on a disk.

The copies belong to one process and are removed at its end.
"""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from hvdtrain.checkpoints import verification
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.remote.stored_checkpoints import StoredCheckpoints
from hvdtrain.checkpoints.storage import FOLDER, MANIFEST_FILE, NAME, Checkpoint
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.reporting.report import PROVENANCE_FILE
from hvdtrain.reporting.stored_runs import FILES
from hvdtrain.storage.files import cache_folder
from hvdtrain.storage.text import name_place, url_of
from hvdtrain.storage.urls import (
    MissingBucketError,
    MissingObjectError,
    StoreError,
    download,
    entries,
    is_url,
    join,
    name,
    parent,
    shown,
)

_LISTINGS = 3  # if checkpoints are removed while they are fetched
_MOST_CHECKPOINTS = 100
_OLD_SECONDS = 24 * 3600.0  # after which the copies of a process that was killed are removed


def locate(place: Path | str) -> Checkpoint:
    """Find the checkpoint that a user names by a path or a URL, verified; of a run its newest good one.

    Raises:
        CheckpointError: If there is none, or the one that was named is corrupt.
        EnvironmentFault: If it cannot be read, or not be kept here.
    """
    if not is_url(place):
        return verification.locate(Path(place))

    def fetched(url: str) -> Checkpoint | None:
        stored = StoredCheckpoints(parent(url))
        if stored.manifest(name(url)) is None:
            return None
        path = _place(url)
        return verification.verify(stored.fetch(name(url), path.parent))

    return _newest(str(place), fetched)


def find_unverified(url: str) -> Checkpoint:
    """Return the checkpoint at a URL, or the newest one of the run there, by its manifest alone.

    Nothing is fetched: what its path is for is to name it. It raises what ``locate`` does.
    """

    def by_manifest(url: str) -> Checkpoint | None:
        manifest = StoredCheckpoints(parent(url)).manifest(name(url))
        return None if manifest is None else Checkpoint(_place(url), manifest)

    return _newest(url, by_manifest)


def _newest(url: str, read: Callable[[str], Checkpoint | None]) -> Checkpoint:
    """Return the first checkpoint there that can be read; one that does not exist is read as None."""
    with reading(url):
        for _ in range(_LISTINGS):
            problems: list[str] = []
            is_removed = False  # by its run, meanwhile
            for one in _candidates(url):
                try:
                    if (found := read(one)) is not None:
                        return Checkpoint(found.path, found.manifest, tuple(problems))
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
    found: dict[str, Manifest] = {}
    with reading(url):
        for one in reversed(_candidates(url)):
            with suppress(CorruptCheckpoint, EnvironmentFault):
                if (manifest := StoredCheckpoints(parent(one)).manifest(name(one))) is not None:
                    found[one] = manifest
    return found


def run_place_of(found: Checkpoint) -> Path | str:
    """Return the run directory that a checkpoint lies in, or its own folder: the URL of a copy's original."""
    if url := url_of(found.path):
        return parent(parent(url)) if name(parent(url)) == FOLDER else parent(url)
    return found.run_dir


def _candidates(url: str) -> list[str]:
    """Return the URL of the checkpoint that is named, or of those of a run, the newest first."""
    if NAME.fullmatch(name(url)) or _is_whole(url):
        return [url]
    for folder in (join(url, FOLDER), url):
        if names := StoredCheckpoints(folder).names():
            return [join(folder, one) for one in reversed(names)]
    return []


def _is_whole(url: str) -> bool:
    return any(name(one.url) == MANIFEST_FILE for one in entries(url))


def _place(url: str) -> Path:
    """Return a new path for a copy, whose folder exists, and which texts name by the URL."""
    folder = _own_folder(os.getpid(), cache_folder().absolute() / "reading")
    path = Path(tempfile.mkdtemp(dir=folder)) / (name(url).strip(".") or "run")
    name_place(path, shown(url))
    return path


@cache
def _own_folder(process: int, place: Path) -> Path:
    """Return a folder of this process, which is removed at its end; a process that was forked has its own."""
    place.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        for path in place.iterdir():
            if time.time() - path.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=place))

    @atexit.register
    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    return folder


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Return a context in which what a store or this host's disk refuses is the environment's fault.

    What does not exist in a bucket that does is a missing checkpoint.
    """
    try:
        yield
    except StoreError as error:
        is_missing = isinstance(error, MissingObjectError) and not isinstance(error, MissingBucketError)
        raise (CheckpointError if is_missing else EnvironmentFault)(error.problem, error.remedy) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{shown(url)} cannot be fetched into {cache_folder()}: {error.strerror or error}",
            "Free space there, or name another folder with HVDTRAIN_CACHE.",
        ) from None


class FetchedRun:
    """A copy of the small files of a run at a URL, at ``path``; there are none before ``refresh``."""

    def __init__(self, url: str, for_report: bool = False) -> None:
        self.url, self._for_report = url, for_report
        self.path = _place(url)
        self.path.mkdir()
        self._versions: dict[str, str] = {}

    def refresh(self) -> None:
        """Fetch what is new, and remove what is no longer there."""
        listed = {name(one.url): one for one in entries(self.url) if not one.is_folder}
        files = (*FILES, PROVENANCE_FILE) if self._for_report else FILES
        found = {key: one for key, one in listed.items() if key in files}
        stored = StoredCheckpoints(join(self.url, FOLDER))
        for checkpoint in stored.names()[-_MOST_CHECKPOINTS:] if self._for_report else ():
            inner = {name(one.url): one for one in entries(join(stored.url, checkpoint))}
            if MANIFEST_FILE in inner:
                found[f"{FOLDER}/{checkpoint}/{MANIFEST_FILE}"] = inner[MANIFEST_FILE]
        for key in self._versions.keys() - found.keys():
            (self.path / key).unlink(missing_ok=True)
            del self._versions[key]
        for key, one in found.items():
            if self._versions.get(key) != one.version:
                path = self.path / key
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(MissingObjectError):  # removed just now
                    download(one.url, path)
                    self._versions[key] = one.version
                    if one.modified is not None:
                        os.utime(path, (one.modified, one.modified))


def local_runs(places: Sequence[Path | str], for_report: bool = False) -> list[Path]:
    """Return the paths of run directories, and of copies of those at URLs: also of a folder of runs.

    Raises:
        EnvironmentFault: If a store cannot be read.
    """
    found: list[Path] = []
    for place in places:
        if not isinstance(place, str):
            found.append(place)
            continue
        with reading(place):
            folders = [place, *(one.url for one in entries(place) if one.is_folder)]
            runs = [place] if _holds_run(place) else [one for one in folders if _holds_run(one)]
            for url in runs or [place]:
                copy = FetchedRun(url, for_report)
                copy.refresh()
                found.append(copy.path)
    return found


def _holds_run(url: str) -> bool:
    return any(name(one.url) in FILES for one in entries(url) if not one.is_folder)
