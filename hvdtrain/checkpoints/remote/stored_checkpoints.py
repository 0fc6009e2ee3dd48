"""The checkpoints of a run in an object store: a checkpoint without a manifest does not exist there."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hvdtrain.checkpoints import manifest as manifests
from hvdtrain.checkpoints import storage, verification
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.remote.claim import CLAIM_FILE
from hvdtrain.checkpoints.storage import MANIFEST_FILE, MODEL_FILE, NAME, OPTIMIZER_FILE
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.storage.files import open_regular
from hvdtrain.storage.transfers import download, upload
from hvdtrain.storage.urls import (
    PATIENCE,
    ChangedObjectError,
    ExistingObjectError,
    MissingObjectError,
    ObjectInfo,
    Patience,
    entries,
    file_system,
    info,
    is_s3,
    join,
    name,
    read,
    remove,
    request,
    shown,
    write,
)

FOLDER = "checkpoints"
_SET_ASIDE = "set-aside-"
_COPIED_BYTES_PER_SECOND = 20_000_000.0  # by a store from one object to another, at least
_FILES = (MODEL_FILE, OPTIMIZER_FILE)


class StoredCheckpoints:
    """The checkpoints in the folder ``checkpoints`` of a run directory at a URL.

    Args:
        url: the run directory.
        patience: how long requests may take.
    """

    def __init__(self, url: str, patience: Patience = PATIENCE) -> None:
        self.url = join(url, FOLDER)
        self._patience = patience

    def names(self) -> list[str]:
        """Return the names of the folders of checkpoints, whole or not, the newest last."""
        found = [name(one.url) for one in entries(self.url, self._patience) if one.is_folder]
        return sorted((one for one in found if NAME.fullmatch(one)), key=step_in)

    def manifest(self, checkpoint: str) -> Manifest | None:
        """Return the manifest of a checkpoint; None if it has none, and so does not exist.

        Raises:
            CorruptCheckpoint: If one byte of it is not as it was written.
            EnvironmentFault: If another version of hvdtrain wrote it.
            StoreError: If the store cannot be read.
        """
        content = self.manifest_bytes(checkpoint)
        return None if content is None else self._parse(checkpoint, content)

    def _parse(self, checkpoint: str, content: bytes) -> Manifest:
        return manifests.parse(content, MANIFEST_FILE, shown(join(self.url, checkpoint)))

    def manifest_bytes(self, checkpoint: str) -> bytes | None:
        """Return what the manifest of a checkpoint holds; None if it has none; raises as ``manifest``."""
        try:
            return read(join(self.url, checkpoint, MANIFEST_FILE), manifests.MAX_BYTES, self._patience)
        except MissingObjectError:
            return None
        except ChangedObjectError as error:
            raise CorruptCheckpoint(str(error)) from None

    def fetch(self, checkpoint: str, folder: Path) -> Path:
        """Download a checkpoint into a folder, which is made if need be, and verify it.

        Returns:
            Its directory; one of that name is replaced.

        Raises:
            CorruptCheckpoint: If it is not what was written.
            StoreError: If the store cannot be read.
            OSError: If it cannot be written here.
        """
        content = self.manifest_bytes(checkpoint)
        if content is None:
            raise CorruptCheckpoint(f"{MANIFEST_FILE} is missing")
        manifest = self._parse(checkpoint, content)
        folder.mkdir(parents=True, exist_ok=True)
        beside = storage.unfinished(folder, checkpoint)
        beside.mkdir()
        try:
            for file in _FILES:
                sha256, url = _digest_of(manifest, file), join(self.url, checkpoint, file)
                try:
                    download(url, beside / file, sha256=sha256, patience=self._patience)
                except MissingObjectError:
                    raise CorruptCheckpoint(f"{file} is missing") from None
                except ChangedObjectError as error:
                    raise CorruptCheckpoint(str(error)) from None
            (beside / MANIFEST_FILE).write_bytes(content)
            verification.verify(beside)
            return storage.put_in_place(beside, folder / checkpoint)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise

    def put(self, source: Path, checkpoint: str, check: Callable[[], None]) -> None:
        """Upload a checkpoint: its files, each read back, then its manifest. Until then it does not exist.

        Args:
            source: the directory with its files, which do not change.
            checkpoint: its name.
            check: called before each object is written; raises a StoreError if it must not be.

        Raises:
            CorruptCheckpoint: If what is in the directory is not what was written.
            StoreError: If the store does not have it whole.
            OSError: If a file cannot be read.
        """
        manifest = manifests.read(source / MANIFEST_FILE)
        content = (source / MANIFEST_FILE).read_bytes()
        try:
            old = self.manifest_bytes(checkpoint)
        except CorruptCheckpoint:
            old = b""
        if old == content:  # which came after its files
            return
        if old is not None:
            check()
            self.set_aside(checkpoint)
        for file in _FILES:
            check()
            sha256, url = _digest_of(manifest, file), join(self.url, checkpoint, file)
            try:
                upload(source / file, url, sha256=sha256, patience=self._patience)
            except ChangedObjectError:
                verification.verify(source)
                raise
        check()
        target = join(self.url, checkpoint, MANIFEST_FILE)
        with suppress(ChangedObjectError, ExistingObjectError):  # there is one since: read which
            write(target, content, self._patience, over="" if is_s3(target) else None)
        if read(target, manifests.MAX_BYTES, self._patience) != content:
            raise ChangedObjectError(f"{shown(target)} is not what was uploaded")

    def set_aside(self, checkpoint: str) -> str:
        """Rename a checkpoint so that nobody takes it for one; return its new name.

        Raises:
            StoreError: If that fails; it is then still there, or there are copies of its files.
        """
        taken = {name(one.url) for one in entries(self.url, self._patience)}
        new, number = f"{_SET_ASIDE}{checkpoint}", 1
        while new in taken:
            number += 1
            new = f"{_SET_ASIDE}{checkpoint}-{number}"
        objects = entries(join(self.url, checkpoint), self._patience)
        for one in sorted(objects, key=lambda one: name(one.url) == MANIFEST_FILE):
            target = join(self.url, new, name(one.url))
            seconds = self._patience.stall_seconds + one.size_bytes / _COPIED_BYTES_PER_SECOND
            patience = replace(self._patience, stall_seconds=seconds)  # no bytes of it move here
            request(one.url, "copied", patience, "cp_file", file_system(target)[1])
            if info(target, self._patience).size_bytes != one.size_bytes:
                raise ChangedObjectError(f"{shown(target)} is not what was copied")
        for one in sorted(objects, key=lambda one: name(one.url) != MANIFEST_FILE):
            remove(one.url, self._patience)
        return new

    def delete(self, checkpoint: str) -> None:
        """Delete a checkpoint: its manifest first, so that one that is half deleted does not exist."""
        for file in (MANIFEST_FILE, *_FILES):
            remove(join(self.url, checkpoint, file), self._patience)


def _digest_of(manifest: Manifest, file: str) -> str:
    if (known := manifest.files.get(file)) is None:
        raise CorruptCheckpoint(f"{MANIFEST_FILE} does not list {file}")
    return known.sha256


def step_in(checkpoint: str) -> int:
    """Return the step in the name of a checkpoint."""
    return storage.step_of(Path(checkpoint))


def value_of(manifest: Manifest, goal: MetricGoal) -> float | None:
    """Return a metric of the evaluation at the step of a checkpoint."""
    return manifest.metrics.get(goal.metric)


_BLOCK_BYTES = 1 << 20
_SNAPSHOT = "snapshot"
_NOT_FETCHED = (FOLDER, "exports", "evaluations.jsonl", "predictions", "profile")


class LogFiles:
    """The files of a run directory at a URL, and of its working copy, that are no checkpoints."""

    def __init__(self, folder: Path, url: str, scratch: Path, patience: Patience = PATIENCE) -> None:
        self._folder, self._url, self._scratch, self._patience = folder, url, scratch, patience
        self._uploaded: dict[str, tuple[int, int, int]] = {}

    def upload(self, check: Callable[[], None]) -> None:
        """Upload the files that changed since they were last uploaded.

        Args:
            check: called before each file; raises a StoreError if nothing must be written.

        Raises:
            StoreError: If the store does not take them.
            OSError: If a file cannot be read, or copied for the upload.
        """
        snapshot = self._scratch / _SNAPSHOT
        for path in self._changed():
            relative = path.relative_to(self._folder).as_posix()
            try:
                version = _copy(path, snapshot)
            except FileNotFoundError:  # it was removed meanwhile
                continue
            check()
            upload(snapshot, join(self._url, relative), patience=self._patience)
            self._uploaded[relative] = version
        snapshot.unlink(missing_ok=True)

    def has_changed(self) -> bool:
        """Return whether there is a file that the store does not have as it is here."""
        return any(True for _ in self._changed())

    def fetch(self) -> None:
        """Download the files that are not here."""
        for one in self._stored(self._url, is_top=True):
            relative = one.url[len(self._url) :].strip("/")
            parts = relative.split("/")
            path = self._folder.joinpath(*parts)
            if any(part in ("", ".", "..") for part in parts) or path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            download(one.url, path, patience=self._patience)
            self._uploaded[relative] = _version_of(path.stat())

    def _stored(self, url: str, is_top: bool = False) -> Iterator[ObjectInfo]:
        for one in entries(url, self._patience):
            own = name(one.url)
            if own.startswith((".", CLAIM_FILE)) or (is_top and own in _NOT_FETCHED):
                continue
            yield from self._stored(one.url) if one.is_folder else (one,)

    def _changed(self) -> Iterator[Path]:
        for path in files_in(self._folder):
            with suppress(FileNotFoundError):
                if self._uploaded.get(path.relative_to(self._folder).as_posix()) != _version_of(path.stat()):
                    yield path


def _copy(path: Path, new: Path) -> tuple[int, int, int]:
    """Copy a file as it is now, which may grow meanwhile; return its version."""
    with open_regular(path, follow=False) as file, new.open("wb") as copy:
        status = os.fstat(file.fileno())
        left = status.st_size
        while left and (block := file.read(min(_BLOCK_BYTES, left))):
            copy.write(block)
            left -= len(block)
    return _version_of(status)


def files_in(folder: Path) -> Iterator[Path]:
    """Return the files of a run directory that are no checkpoints, no locks and not hidden."""
    for place, folders, files in os.walk(folder):
        left_out = (FOLDER, "exports") if Path(place) == folder else ()
        folders[:] = sorted(
            one for one in folders if not one.startswith((".", "sending-")) and one not in left_out
        )
        for one in sorted(files):
            path = Path(place, one)
            with suppress(OSError):
                if (
                    not one.startswith(".")
                    and not one.endswith(".lock")
                    and stat.S_ISREG(path.lstat().st_mode)
                ):
                    yield path


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
