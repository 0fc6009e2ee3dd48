"""The checkpoints of a run in an object store: a checkpoint without a manifest does not exist there."""

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
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
        """Return the names of the folders of checkpoints, whole or not, the newest last.

        Raises:
            StoreError: If the store cannot be read.
        """
        found = [name(one.url) for one in entries(self.url, self._patience) if one.is_folder]
        return sorted((one for one in found if NAME.fullmatch(one)), key=step_in)

    def manifest(self, checkpoint: str) -> Manifest | None:
        """Return the manifest of a checkpoint; None if it has none, and so does not exist.

        Raises:
            CorruptCheckpoint: If one byte of it is not as it was written.
            EnvironmentFault: If another version of hvdtrain wrote it.
            StoreError: If the store cannot be read.
        """
        place = join(self.url, checkpoint)
        content = self.manifest_bytes(checkpoint)
        return None if content is None else manifests.parse(content, MANIFEST_FILE, shown(place))

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
        manifest = manifests.parse(content, MANIFEST_FILE, shown(join(self.url, checkpoint)))
        folder.mkdir(parents=True, exist_ok=True)
        beside = storage.unfinished(folder, checkpoint)
        beside.mkdir()
        try:
            for file in _FILES:
                known = manifest.files.get(file)
                if known is None:
                    raise CorruptCheckpoint(f"{MANIFEST_FILE} does not list {file}")
                try:
                    download(
                        join(self.url, checkpoint, file),
                        beside / file,
                        sha256=known.sha256,
                        size_bytes=known.bytes,
                        patience=self._patience,
                    )
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
        if (old := self._old_manifest(checkpoint)) is not None:
            if old == content:  # which came after its files
                return
            check()
            self.set_aside(checkpoint)
        for file in _FILES:
            check()
            known = manifest.files.get(file)
            if known is None:
                raise CorruptCheckpoint(f"{MANIFEST_FILE} does not list {file}")
            try:
                upload(
                    source / file,
                    join(self.url, checkpoint, file),
                    sha256=known.sha256,
                    patience=self._patience,
                )
            except ChangedObjectError:
                verification.verify(source)
                raise
        check()
        target = join(self.url, checkpoint, MANIFEST_FILE)
        with suppress(ChangedObjectError, ExistingObjectError):  # there is one since: read which
            write(target, content, self._patience, over="" if is_s3(target) else None)
        if read(target, manifests.MAX_BYTES, self._patience) != content:
            raise ChangedObjectError(f"{shown(target)} is not what was uploaded")

    def _old_manifest(self, checkpoint: str) -> bytes | None:
        try:
            return self.manifest_bytes(checkpoint)
        except CorruptCheckpoint:
            return b""

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
        files = [name(one.url) for one in entries(join(self.url, checkpoint), self._patience)]
        for file in sorted(files, key=lambda one: one == MANIFEST_FILE):
            self._copy(checkpoint, new, file)
        for file in sorted(files, key=lambda one: one != MANIFEST_FILE):
            remove(join(self.url, checkpoint, file), self._patience)
        return new

    def _copy(self, checkpoint: str, new: str, file: str) -> None:
        """Copy an object in the store, which moves no bytes here."""
        from hvdtrain.storage.urls import file_system

        old_url, new_url = join(self.url, checkpoint, file), join(self.url, new, file)
        size = info(old_url, self._patience).size_bytes
        seconds = self._patience.stall_seconds + size / _COPIED_BYTES_PER_SECOND  # no bytes of it move here
        patience = replace(self._patience, stall_seconds=seconds)
        request(old_url, "copied", patience, "cp_file", file_system(new_url)[1])
        if info(new_url, self._patience).size_bytes != size:
            raise ChangedObjectError(f"{shown(new_url)} is not what was copied")

    def delete(self, checkpoint: str) -> None:
        """Delete a checkpoint: its manifest first, so that one that is half deleted does not exist.

        Raises:
            StoreError: If that fails; it may be called again.
        """
        for file in (MANIFEST_FILE, *_FILES):
            remove(join(self.url, checkpoint, file), self._patience)


def step_in(checkpoint: str) -> int:
    """Return the step in the name of a checkpoint."""
    return storage.step_of(Path(checkpoint))


def to_delete(
    stored: Mapping[str, Manifest],
    url: str,
    keep_last: int | None,
    goal: MetricGoal | None,
    spared: Iterable[str],
) -> list[str]:
    """Return which checkpoints in the store need not be kept, the oldest first: only such as this run wrote.

    Args:
        stored: manifests by name.
        url: the run directory, which the manifests of this run name.
        keep_last: how many of the newest to keep; None keeps all.
        goal: the metric whose best checkpoint is kept, too.
        spared: names of others that are kept.
    """
    if keep_last is None:
        return []
    own = sorted((one for one, found in stored.items() if found.config.get("run_dir") == url), key=step_in)
    keep = {*own[-keep_last:], *spared}
    if goal is not None:
        best: str | None = None
        for one in own:
            if goal.improves(value_of(stored[one], goal), value_of(stored[best], goal) if best else None):
                best = one
        keep |= {best} if best else set()
    return [one for one in own if one not in keep]


def value_of(manifest: Manifest, goal: MetricGoal) -> float | None:
    """Return a metric of the evaluation at the step of a checkpoint."""
    return manifest.metrics.get(goal.metric)


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
