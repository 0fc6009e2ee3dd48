"""Runs at URLs, for those who only read them: copies of their small files, which are read as a run directory.

The copies belong to one process and are removed at its end.
"""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from hvdtrain.checkpoints.remote.fetched import local_name, reading
from hvdtrain.checkpoints.remote.stored_checkpoints import FOLDER
from hvdtrain.checkpoints.storage import MANIFEST_FILE, NAME
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.reporting.stored_runs import FILES
from hvdtrain.storage.files import cache_folder
from hvdtrain.storage.text import name_place
from hvdtrain.storage.transfers import download
from hvdtrain.storage.urls import MissingObjectError, ObjectInfo, entries, join, name, shown

_MOST_CHECKPOINTS = 100
_MAX_BYTES = 1 << 30  # of a file; a larger one is left out
_OLD_SECONDS = 24 * 3600.0  # after which the copies of a process that was killed are removed
_BLOCK_BYTES = 1 << 20


class FetchedRun:
    """A copy of the small files of a run at a URL.

    Args:
        url: the run directory.
        for_report: whether the events of TensorBoard and the manifests of the checkpoints are fetched, too.

    Attributes:
        path: the copy.
    """

    def __init__(self, url: str, for_report: bool = False) -> None:
        self.url, self._for_report = url, for_report
        self.path = _own_folder() / uuid4().hex / local_name(url)
        self.path.mkdir(parents=True)
        name_place(self.path, shown(url))
        self._versions: dict[str, str] = {}

    def refresh(self) -> None:
        """Fetch what is new, and remove what is no longer there.

        Raises:
            StoreError: If the store cannot be read.
            OSError: If the copy cannot be written.
        """
        self.take(entries(self.url))

    def take(self, listing: Iterable[ObjectInfo]) -> None:
        """Make the copy what a listing of the run directory says; raises as ``refresh`` does."""
        found = {name(one.url): one for one in listing if not one.is_folder and self._is_wanted(one)}
        if self._for_report:
            found |= self._manifests()
        for key in [key for key in self._versions if key not in found]:
            (self.path / key).unlink(missing_ok=True)
            del self._versions[key]
        for key, one in found.items():
            if self._versions.get(key) != one.version:
                with suppress(MissingObjectError):  # removed just now
                    self._fetch(key, one)
                    self._versions[key] = one.version

    def _is_wanted(self, one: ObjectInfo) -> bool:
        is_event_file = self._for_report and name(one.url).startswith("events.out.tfevents")
        return one.size_bytes <= _MAX_BYTES and (name(one.url) in FILES or is_event_file)

    def _manifests(self) -> Mapping[str, ObjectInfo]:
        folders = [one for one in entries(join(self.url, FOLDER)) if one.is_folder]
        newest = sorted((one.url for one in folders if NAME.fullmatch(name(one.url))), key=name)
        found = {}
        for folder in newest[-_MOST_CHECKPOINTS:]:
            for one in entries(folder):
                if name(one.url) == MANIFEST_FILE:
                    found[f"{FOLDER}/{name(folder)}/{MANIFEST_FILE}"] = one
        return found

    def _fetch(self, key: str, one: ObjectInfo) -> None:
        path = self.path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".new-{path.name}")
        download(one.url, new)
        if key == METRICS_FILE and path.exists() and _begins_with(new, path):
            with new.open("rb") as source, path.open("ab") as grown:  # who follows it sees that it has grown
                source.seek(path.stat().st_size)
                shutil.copyfileobj(source, grown)
            new.unlink()
        else:
            new.replace(path)
        if one.modified is not None:
            os.utime(path, (one.modified.timestamp(), one.modified.timestamp()))


def local_runs(places: Sequence[Path | str], for_report: bool = False) -> list[Path]:
    """Return the paths of run directories, and copies of those at URLs.

    A URL of a folder of runs stands for all of them.

    Args:
        places: paths and URLs.
        for_report: as of ``FetchedRun``.

    Raises:
        EnvironmentFault: If a store cannot be read.
    """
    found: list[Path] = []
    for place in places:
        if isinstance(place, str):
            with reading(place):
                found += _fetched_runs(place, for_report)
        else:
            found.append(place)
    return found


def _fetched_runs(url: str, for_report: bool) -> list[Path]:
    """Return copies of the run at a URL, or of the runs in that folder; an empty folder if there is none."""
    listing = entries(url)
    runs = [(url, listing)]
    if not _holds_run(listing):
        inner = [(one.url, entries(one.url)) for one in listing if one.is_folder]
        runs = [(folder, of_folder) for folder, of_folder in inner if _holds_run(of_folder)] or runs
    copies = []
    for folder, of_folder in runs:
        copy = FetchedRun(folder, for_report)
        copy.take(of_folder)
        copies.append(copy.path)
    return copies


def _holds_run(listing: Iterable[ObjectInfo]) -> bool:
    return any(name(one.url) in FILES for one in listing if not one.is_folder)


def _begins_with(path: Path, other: Path) -> bool:
    with path.open("rb") as file, other.open("rb") as start:
        while block := start.read(_BLOCK_BYTES):
            if file.read(len(block)) != block:
                return False
    return True


_FOLDERS: dict[int, Path] = {}  # by process: a forked one has its own


def _own_folder() -> Path:
    """Return a folder of this process, which is removed at its end."""
    if os.getpid() not in _FOLDERS:
        beside = cache_folder().absolute() / "reading"
        beside.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            for path in beside.iterdir():
                if time.time() - path.stat().st_mtime > _OLD_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=beside))
        _FOLDERS[os.getpid()] = folder
        atexit.register(_remove, folder, os.getpid())
    return _FOLDERS[os.getpid()]


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
