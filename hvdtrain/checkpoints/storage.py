"""Checkpoints on disk: portable state as a directory that is written atomically.

``step-00000120/`` holds ``model.safetensors``, ``optimizer.safetensors`` and ``trainer.json``. It is
written under another name, synced and renamed into place. ``trainer.json`` has the size and the
SHA-256 of the other files and of itself, so that a changed byte anywhere is detected. Nothing in a
checkpoint is executed when it is loaded.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hvdtrain.backends.portable.names import is_kept, is_private
from hvdtrain.backends.records import PortableState
from hvdtrain.checkpoints import manifest as manifests
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, FileInfo, Manifest
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.storage.files import NotAFileError, open_regular
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.wire_types import travels

MODEL_FILE = "model.safetensors"
_COMPLEX128 = "complex128"  # in a file's metadata: the arrays that it holds as pairs, as the format has none
OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST_FILE = "trainer.json"
FOLDER = "checkpoints"  # of a run directory
NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".new-"  # being written; what a killed run leaves is removed by the next save
_REMOVED = ".removed-"  # being deleted
_QUARANTINED = "set-aside-"  # not loaded, not deleted
_PIECE_BYTES = 1 << 20
# of the names of types in the files, those that numpy has
_NUMPY_KINDS = {"BOOL": "?", "U8": "u1", "I8": "i1"} | {
    f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "UIF" for size in (2, 4, 8)
}
_NUMPY_KINDS["C64"] = "<c8"


@travels
@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path  # its directory
    manifest: Manifest  # what ``trainer.json`` holds
    damaged: tuple[str, ...] = ()  # newer ones of the run that were passed over, with what is wrong with them

    @property
    def run_dir(self) -> Path:
        """The run directory that it lies in, or its own folder where it lies in none."""
        folder = self.path.parent
        return folder.parent if folder.name == FOLDER else folder

    def notes(self) -> list[str]:
        """Return what to report to the user: that it is not the newest one of the run, if it is not."""
        found = f"{'; '.join(self.damaged[:4])}; {self.path.name} is used"
        return [f"this is not the run's newest checkpoint, which is damaged: {found}"] if self.damaged else []

    def read(self) -> PortableState:
        """Return the state, whose arrays are mapped from the files: they take memory when they are used."""
        return {**_read_arrays(self.path / MODEL_FILE), **_read_arrays(self.path / OPTIMIZER_FILE)}

    def read_model(self) -> PortableState:
        """Return the model's part of the state, likewise."""
        return _read_arrays(self.path / MODEL_FILE)


def name_of(step: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"step-{step:08d}"


def write(
    folder: Path, state: PortableState, manifest: Manifest, check: Callable[[], None] = lambda: None
) -> Path:
    """Write a checkpoint, all or nothing, in place of one of that step; return its directory."""
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)  # not its parent, which may have been removed just now
        _sync(folder.parent)
    for left in folder.iterdir():  # of killed runs
        if left.name.startswith((_UNFINISHED, _REMOVED)):
            _remove(left)
    path = folder / name_of(manifest.step)
    beside = unfinished(folder, path.name)
    beside.mkdir()
    try:
        parts: dict[str, PortableState] = {MODEL_FILE: {}, OPTIMIZER_FILE: {}}
        for name, array in state.items():
            own = name.partition("/")[2] if is_private(name) else name
            is_of_optimizer = own.startswith("optimizer/") or is_kept(name)
            parts[OPTIMIZER_FILE if is_of_optimizer else MODEL_FILE][name] = array
        files = {name: _write_arrays(beside / name, part) for name, part in parts.items()}
        content = manifests.to_bytes(manifest.model_copy(update={"files": files}))
        (beside / MANIFEST_FILE).write_bytes(content)
        _sync(beside / MANIFEST_FILE)
        _sync(beside)
        check()
        put_in_place(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return path


def unfinished(folder: Path, name: str) -> Path:
    """Return a path for what becomes a checkpoint, which nobody takes for one before."""
    # nobody else's: a worker of an elastic job that was given up may be writing the same step
    return folder / f"{_UNFINISHED}{name}-{secrets.token_hex(4)}"


def put_in_place(beside: Path, path: Path) -> Path:
    """Give a checkpoint that is whole its name, and return it; one of that name is replaced."""
    if path.exists():
        remove(path)
    beside.rename(path)
    _sync(path.parent)
    return path


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, good or not, the newest last."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path | str) -> int:
    """Return the step in the name of a checkpoint's directory."""
    return int(str(path).rpartition("-")[2])


def quarantine(path: Path) -> str:
    """Rename a checkpoint so that nobody takes it for one; say what was done."""
    names = (f"{_QUARANTINED}{path.name}{f'-{number}' if number else ''}" for number in itertools.count())
    beside = next(new for name in names if not (new := path.with_name(name)).exists())
    try:
        path.rename(beside)
    except OSError as error:
        return f"it stays where it is ({error.strerror})"
    return f"set aside as {beside.name}"


def quarantine_later(folder: Path, step: int) -> list[str]:
    """Take checkpoints of later steps out of the way of a run that is about to go another way; say so."""
    later = [path for path in checkpoints_in(folder) if step_of(path) > step]
    return [f"checkpoint {path} is of a later step; {quarantine(path)}" for path in later]


def retain(folder: Path, keep: Container[Path | None]) -> None:
    """Delete the checkpoints in a folder but these; one that is half deleted has another name."""
    for path in checkpoints_in(folder):
        if path not in keep:
            remove(path)


def remove(path: Path) -> None:
    """Delete a checkpoint; one that is half deleted has another name."""
    removed = path.with_name(f"{_REMOVED}{path.name}")
    path.rename(removed)
    _remove(removed)


def _write_arrays(path: Path, arrays: PortableState) -> FileInfo:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # the library writes an array's memory as it lies there, whatever its strides
    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    doubles = [name for name, array in in_order.items() if array.dtype == np.complex128]
    in_order |= {name: in_order[name][..., None].view(np.float64) for name in doubles}
    try:
        save_file(in_order, path, {_COMPLEX128: json.dumps(doubles)} if doubles else None)
    except SafetensorError as error:  # which has the system's number in its text
        number = re.search(r"os error (\d+)", str(error))
        at = (int(number[1]), os.strerror(int(number[1])), str(path)) if number else (str(error),)
        raise OSError(*at) from None
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library's files are the owner's alone
    _sync(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileInfo(sha256=digest, bytes=path.stat().st_size)


def _read_arrays(path: Path) -> PortableState:
    """Return the arrays of a file, mapped from it: what is written to them does not reach the file."""
    from safetensors import SafetensorError, safe_open

    ACTIVITY.progress()
    try:
        with safe_open(path, "numpy") as file:
            parts = [(name, file.get_slice(name)) for name in file.offset_keys()]
            kinds = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in parts]
            doubles = set(json.loads((file.metadata() or {}).get(_COMPLEX128, "[]")))
    except SafetensorError as error:
        raise CorruptCheckpoint(f"{path.name}: {error}") from None
    for name, kind, _ in kinds:
        if kind not in _NUMPY_KINDS:
            raise CorruptCheckpoint(f"{path.name}: {name} has the type {kind}")
    content = np.asarray(np.memmap(path, np.uint8, "c"))
    sizes = [math.prod(shape) * np.dtype(_NUMPY_KINDS[kind]).itemsize for _, kind, shape in kinds]
    arrays: PortableState = {}
    begin = len(content) - sum(sizes)
    for (name, kind, shape), size in zip(kinds, sizes, strict=True):
        array = content[begin : begin + size].view(_NUMPY_KINDS[kind]).reshape(shape)
        arrays[name] = array.view(np.complex128)[..., 0] if name in doubles else array
        begin += size
    return arrays


def _sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a directory with all that is in it, or a file or link of that name, as far as it goes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


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


def _newest(folder: Path, damaged: dict[Path, str]) -> Checkpoint | None:
    """Return the newest checkpoint in a folder that verifies, if there is one; note why others do not."""
    for path in reversed(checkpoints_in(folder)):
        try:
            return verify(path)
        except CorruptCheckpoint as error:
            damaged[path] = str(error)
    return None


def newest_good(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that verifies, or None if there is none at all, and what to report."""
    damaged: dict[Path, str] = {}
    with _readable(folder):
        found = _newest(folder, damaged)
    if damaged and found is None:
        shown = "; ".join(f"{path.name}: {why}" for path, why in list(damaged.items())[:4])
        raise CheckpointError(
            f"no checkpoint in {folder} verifies: {shown}",
            f"They were left as they are. Remove {folder} to train from the beginning, or choose another "
            "--run-dir.",
        )
    return found, [f"checkpoint {at} is damaged: {why}; {quarantine(at)}" for at, why in damaged.items()]


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
    damaged: dict[Path, str] = {}
    with _readable(path):
        if not path.exists():
            raise CheckpointError(
                f"there is no checkpoint {path} (looked in {Path.cwd()})", _known(path.parent)
            )
        if (path / MANIFEST_FILE).exists() or NAME.fullmatch(path.name):
            try:
                return verify(path)
            except CorruptCheckpoint as corruption:
                known = _known(path.parent, other_than=path)
                raise CheckpointError(f"checkpoint {path} is damaged: {corruption}", known) from None
        found = _newest(path / FOLDER, damaged) or _newest(path, damaged)
    problems = tuple(f"{one.name}: {why}" for one, why in damaged.items())
    if found is not None:
        return replace(found, damaged=problems)
    raise none_in(path, "directory", problems)


def none_in(place: object, kind: str, problems: Sequence[str]) -> CheckpointError:
    """Return the error for a place, a "directory" or a "URL", with no good checkpoint."""
    return CheckpointError(
        "; ".join([f"no {'good ' if problems else ''}checkpoint in {place}", *problems[:4]]),
        f"Give the {kind} of a run, or of a checkpoint such as RUN_DIR/checkpoints/step-00000120.",
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
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) != info.bytes:
                raise CorruptCheckpoint(f"{path.name} has {size:,} bytes, of {info.bytes:,}")
            while size := file.readinto(piece):
                digest.update(piece[:size])
                ACTIVITY.progress()
    except NotAFileError as error:
        raise CorruptCheckpoint(str(error)) from None
    if digest.hexdigest() != info.sha256:
        raise CorruptCheckpoint(f"the content of {path.name} has changed")


def values_in(folder: Path, metric: str, step: int) -> dict[Path, float | None]:
    """Return a metric of the checkpoints in a folder up to a step; those without a manifest are left out."""
    manifests_of = {path: read_manifest(path) for path in checkpoints_in(folder) if step_of(path) <= step}
    return {path: found.metrics.get(metric) for path, found in manifests_of.items() if found is not None}
