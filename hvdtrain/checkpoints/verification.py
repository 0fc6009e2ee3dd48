"""Verifying checkpoints, and finding the newest good one: a changed byte anywhere is detected."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from io import BufferedReader
from pathlib import Path

from hvdtrain.checkpoints import manifest as manifests
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, FileInfo, Manifest
from hvdtrain.checkpoints.storage import (
    MANIFEST_FILE,
    MODEL_FILE,
    NAME,
    OPTIMIZER_FILE,
    Checkpoint,
    checkpoints_in,
    quarantine,
    step_of,
)
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.storage.files import NotAFileError, open_regular
from hvdtrain.workers.activity import ACTIVITY

_PIECE_BYTES = 1 << 20


def verify(path: Path) -> Checkpoint:
    """Check every byte; CorruptCheckpoint says what is wrong, EnvironmentFault that it cannot be read."""
    with _readable(path):
        try:
            manifest = manifests.read(path / MANIFEST_FILE)
            for name in (MODEL_FILE, OPTIMIZER_FILE):
                _check_file(path / name, manifest.files.get(name))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise CorruptCheckpoint(f"{Path(error.filename).name} is missing") from None
    return Checkpoint(path, manifest)


def newest_good(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that verifies, or None if there is none at all, and what to report."""
    damaged: dict[Path, str] = {}
    with _readable(folder):
        paths = checkpoints_in(folder)
    for path in reversed(paths):
        try:
            found = verify(path)
        except CorruptCheckpoint as corruption:
            damaged[path] = str(corruption)
            continue
        return found, [f"checkpoint {at} is damaged: {why}; {quarantine(at)}" for at, why in damaged.items()]
    if damaged:
        shown = "; ".join(f"{path.name}: {why}" for path, why in list(damaged.items())[:4])
        raise CheckpointError(
            f"no checkpoint in {folder} verifies: {shown}",
            f"They were left as they are. Remove {folder} to train from the beginning, or choose another "
            "--run-dir.",
        )
    return None, []


def newest_verified(folder: Path) -> Path | None:
    """Return the newest checkpoint that verifies; nothing is quarantined."""
    with contextlib.suppress(OSError):
        for path in reversed(checkpoints_in(folder)):
            with contextlib.suppress(CorruptCheckpoint, EnvironmentFault):
                return verify(path).path
    return None


def read_manifest(path: Path) -> Manifest | None:
    """Read what a checkpoint says of itself, its other files unseen; None if that is corrupt."""
    try:
        return manifests.read(path / MANIFEST_FILE)
    except (CorruptCheckpoint, EnvironmentFault, OSError):
        return None


def locate(path: Path) -> Checkpoint:
    """Find the checkpoint that a user names: its directory, or a run's, for its newest good one."""
    problems: list[str] = []
    with _readable(path):
        if not path.exists():
            known = _known(path.parent)
            raise CheckpointError(f"there is no checkpoint {path} (looked in {Path.cwd()})", known)
        if (path / MANIFEST_FILE).exists() or NAME.fullmatch(path.name):
            try:
                return verify(path)
            except CorruptCheckpoint as corruption:
                known = _known(path.parent, other_than=path)
                raise CheckpointError(f"checkpoint {path} is damaged: {corruption}", known) from None
        for folder in (path / "checkpoints", path):
            for candidate in reversed(checkpoints_in(folder)):
                try:
                    return replace(verify(candidate), damaged=tuple(problems))
                except CorruptCheckpoint as corruption:
                    problems.append(f"{candidate.name}: {corruption}")
    found = "no good checkpoint in" if problems else "no checkpoint in"
    raise CheckpointError(
        "; ".join([f"{found} {path}", *problems[:4]]),
        "Give a run directory, or a directory such as RUN_DIR/checkpoints/step-00000120.",
    )


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Return a context in which what the system refuses is the environment's fault, and named so."""
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"cannot read the checkpoint {path}: {error.strerror or error}",
            "Nothing was changed. Mend the disk or the permissions and start again.",
        ) from None


def _known(folder: Path, other_than: Path | None = None) -> str:
    paths = [path for path in checkpoints_in(folder) if path != other_than]
    return f"In the same folder: {', '.join(path.name for path in paths[-4:])}." if paths else ""


def _check_file(path: Path, info: FileInfo | None) -> None:
    if info is None:
        raise CorruptCheckpoint(f"{MANIFEST_FILE} does not list {path.name}")
    try:
        file = open_regular(path)
    except NotAFileError as error:
        raise CorruptCheckpoint(str(error)) from None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != info.bytes:
            raise CorruptCheckpoint(f"{path.name} has {size:,} bytes, of {info.bytes:,}")
        if _digest(file) != info.sha256:
            raise CorruptCheckpoint(f"the content of {path.name} has changed")


def _digest(file: BufferedReader) -> str:
    """Return the SHA-256 of a file; the watch of the workers sees the progress."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
    while size := file.readinto(piece):
        digest.update(piece[:size])
        ACTIVITY.progress()
    return digest.hexdigest()


def values_in(folder: Path, metric: str, step: int) -> dict[Path, float | None]:
    """Return a metric of the checkpoints in a folder up to a step; those without a manifest are left out."""
    paths = [path for path in checkpoints_in(folder) if step_of(path) <= step]
    manifests_of = {path: read_manifest(path) for path in paths}
    return {path: found.metrics.get(metric) for path, found in manifests_of.items() if found is not None}
