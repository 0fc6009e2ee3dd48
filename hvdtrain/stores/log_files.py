"""The files of a run beside its checkpoints: uploaded whole when they changed, as stores cannot append."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from hvdtrain.checkpoints.remote.claim import CLAIM_FILE
from hvdtrain.checkpoints.remote.stored_checkpoints import FOLDER
from hvdtrain.checkpoints.storage import NAME
from hvdtrain.storage.files import open_regular
from hvdtrain.storage.object_info import ObjectInfo
from hvdtrain.storage.transfers import download, upload
from hvdtrain.storage.urls import PATIENCE, Patience, entries, join, name

_BLOCK_BYTES = 1 << 20
_SNAPSHOT = "snapshot"
_NOT_FETCHED = (FOLDER, "exports", "evaluations.jsonl", "predictions", "profile")


class LogFiles:
    """The files of a run directory at a URL that are no checkpoints.

    Args:
        folder: the working copy of the run directory.
        url: the run directory.
        scratch: a folder of the same file system for a copy of the file that is being uploaded.
        patience: how long requests may take.
    """

    def __init__(self, folder: Path, url: str, scratch: Path, patience: Patience = PATIENCE) -> None:
        self._folder, self._url, self._scratch, self._patience = folder, url, scratch, patience
        self._uploaded: dict[str, tuple[int, int, int]] = {}

    def upload(self, check: Callable[[], None], *, read_back: bool = False) -> int:
        """Upload the files that changed since they were last uploaded.

        Args:
            check: called before each file; raises a StoreError if nothing must be written.
            read_back: whether to read back what was uploaded; its size is compared anyway.

        Returns:
            How many bytes were uploaded.

        Raises:
            StoreError: If the store does not take them.
            OSError: If a file cannot be read, or copied for the upload.
        """
        moved = 0
        for path in self._changed():
            relative = path.relative_to(self._folder).as_posix()
            try:
                version, digest = self._copy(path)
            except FileNotFoundError:  # it was removed meanwhile
                continue
            snapshot = self._scratch / _SNAPSHOT
            check()
            upload(
                snapshot,
                join(self._url, relative),
                sha256=digest if read_back else None,
                patience=self._patience,
            )
            moved += snapshot.stat().st_size
            self._uploaded[relative] = version
        (self._scratch / _SNAPSHOT).unlink(missing_ok=True)
        return moved

    def has_changed(self) -> bool:
        """Return whether there is a file that the store does not have as it is here."""
        return any(True for _ in self._changed())

    def fetch(self) -> None:
        """Download the files that are not here.

        Raises:
            StoreError: If the store cannot be read.
            OSError: If they cannot be written.
        """
        for one in self._stored(self._url, is_top=True):
            relative = one.url[len(self._url) :].strip("/")
            parts = relative.split("/")
            path = self._folder.joinpath(*parts)
            if any(part in ("", ".", "..") for part in parts) or path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            download(one.url, path, patience=self._patience)
            self._uploaded[relative] = _version(path)

    def _stored(self, url: str, is_top: bool = False) -> Iterator[ObjectInfo]:
        for one in entries(url, self._patience):
            own = name(one.url)
            if own.startswith((".", CLAIM_FILE)) or (is_top and own in _NOT_FETCHED):
                continue
            if one.is_folder:
                yield from self._stored(one.url)
            else:
                yield one

    def _changed(self) -> Iterator[Path]:
        for path in files_in(self._folder):
            with suppress(FileNotFoundError):
                if self._uploaded.get(path.relative_to(self._folder).as_posix()) != _version(path):
                    yield path

    def _copy(self, path: Path) -> tuple[tuple[int, int, int], str]:
        """Copy a file as it is now, which may grow meanwhile; return its version and its SHA-256."""
        found = hashlib.sha256()
        with open_regular(path, follow=False) as file, (self._scratch / _SNAPSHOT).open("wb") as copy:
            status = os.fstat(file.fileno())
            left = status.st_size
            while left and (block := file.read(min(_BLOCK_BYTES, left))):
                found.update(block)
                copy.write(block)
                left -= len(block)
        return _version_of(status), found.hexdigest()


def files_in(folder: Path) -> Iterator[Path]:
    """Return the files of a run directory that are no checkpoints, no locks and not hidden."""
    for place, folders, files in os.walk(folder):
        is_top = Path(place) == folder
        folders[:] = sorted(
            one
            for one in folders
            if not one.startswith((".", "sending-")) and not (is_top and one in (FOLDER, "exports"))
        )
        for one in sorted(files):
            path = Path(place, one)
            if one.startswith(".") or one.endswith(".lock") or path.is_symlink():
                continue
            with suppress(OSError):
                if stat.S_ISREG(path.stat().st_mode):
                    yield path


def _version(path: Path) -> tuple[int, int, int]:
    return _version_of(path.stat())


def _version_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


def never_uploaded(folder: Path) -> list[str]:
    """Return what a run directory holds that is not uploaded: exports, links, what was set aside."""
    checkpoints = folder / FOLDER
    found = [path for path in (folder / "exports",) if path.exists()]
    found += [path for path in folder.rglob("*") if path.is_symlink()]
    if checkpoints.is_dir():
        found += [path for path in checkpoints.iterdir() if not path.name.startswith(".")]
    names = {path.relative_to(folder).as_posix() for path in found if not NAME.fullmatch(path.name)}
    return sorted(name for name in names if not name.startswith("."))
