"""Checkpoints on disk: portable state as a directory that is whole or not there.

``step-00000120/`` holds ``model.safetensors``, ``optimizer.safetensors`` and ``trainer.json``. It is
written under another name, synced and renamed into place. ``trainer.json`` has the size and the
SHA-256 of the other files and of itself, so that a changed byte anywhere shows. Nothing in a
checkpoint is executed when it is loaded.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain import record as records
from hvdtrain.backends._names import is_private
from hvdtrain.backends.base import PortableState
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.record import Damage, FileFacts, Record

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RECORD_FILE = "trainer.json"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".new-"  # being written; what a killed run leaves is removed by the next save
_REMOVED = ".removed-"  # being deleted
_SET_ASIDE = "set-aside-"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: its directory.
        record: what ``trainer.json`` holds.
    """

    path: Path
    record: Record

    def read(self) -> PortableState:
        """Read the state.

        Raises:
            Damage: where the files are not in the format that their names say.
        """
        return {**_read_arrays(self.path / MODEL_FILE), **_read_arrays(self.path / OPTIMIZER_FILE)}

    def read_model(self) -> PortableState:
        """Read the model's part of the state, likewise."""
        return _read_arrays(self.path / MODEL_FILE)


def name_of(step: int) -> str:
    """Give the name of a checkpoint's directory."""
    return f"step-{step:08d}"


def write(folder: Path, state: PortableState, record: Record) -> Path:
    """Write a checkpoint into ``folder``, which is made if need be: whole, or not at all.

    Args:
        folder: where checkpoints lie.
        state: portable state.
        record: what is known of it; ``files`` is filled in here.

    Returns:
        The checkpoint's directory. One of the same step that was there is replaced.

    Raises:
        OSError: where it cannot be written; nothing of it is left, and older ones are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    path = folder / name_of(record.step)
    beside = folder / f"{_UNFINISHED}{path.name}"
    beside.mkdir()
    try:
        parts: dict[str, PortableState] = {MODEL_FILE: {}, OPTIMIZER_FILE: {}}
        for name in list(state):
            parts[OPTIMIZER_FILE if is_of_optimizer(name) else MODEL_FILE][name] = state[name]
        files = {name: _write_arrays(beside / name, part) for name, part in parts.items()}
        _write_synced(beside / RECORD_FILE, records.to_bytes(record.model_copy(update={"files": files})))
        _sync(beside)
        if path.exists():
            _delete(path)
        beside.rename(path)
        _sync(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return path


def is_of_optimizer(name: str) -> bool:
    """Whether a portable name, or a framework's private one, belongs to the optimizer."""
    _, _, rest = name.partition("/")
    return (rest if is_private(name) else name).startswith("optimizer/")


def verify(path: Path) -> Checkpoint:
    """Check every byte of a checkpoint.

    Raises:
        Damage: saying which file is missing, of another size or content, or unreadable as JSON.
        EnvironmentFault: where a file is there but cannot be read.
    """
    with _readable(path):
        try:
            record = records.read(path / RECORD_FILE)
            for name in (MODEL_FILE, OPTIMIZER_FILE):
                _check_file(path / name, record.files.get(name))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise Damage(f"{Path(error.filename).name} is missing") from None
    return Checkpoint(path, record)


def checkpoints_in(folder: Path) -> list[Path]:
    """Give the checkpoints in a folder, good or not, the newest last.

    Raises:
        OSError: where the folder cannot be read.
    """
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """Give the step in the name of a checkpoint's directory."""
    return int(path.name.rpartition("-")[2])


def newest_good(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest checkpoint that verifies; damaged ones above it are set aside, not deleted.

    Returns:
        The checkpoint, or None where none is good, and what to tell the user.

    Raises:
        EnvironmentFault: where a file cannot be read.
    """
    notes: list[str] = []
    with _readable(folder):
        paths = checkpoints_in(folder)
    for path in reversed(paths):
        try:
            return verify(path), notes
        except Damage as damage:
            notes.append(f"checkpoint {path} is damaged: {damage}; {set_aside(path)}")
    return None, notes


def newest_verified(folder: Path) -> Path | None:
    """Give the newest checkpoint that verifies; nothing is set aside."""
    with contextlib.suppress(OSError):
        for path in reversed(checkpoints_in(folder)):
            with contextlib.suppress(Damage, EnvironmentFault):
                return verify(path).path
    return None


def read_record(path: Path) -> Record | None:
    """Read what a checkpoint says of itself, its other files unseen; None where that is damaged."""
    try:
        return records.read(path / RECORD_FILE)
    except (Damage, EnvironmentFault, OSError):
        return None


def set_aside(path: Path) -> str:
    """Rename a checkpoint so that nobody takes it for one; say what was done."""
    for number in range(1, 1000):
        beside = path.with_name(f"{_SET_ASIDE}{path.name}" + (f"-{number}" if number > 1 else ""))
        if beside.exists():
            continue
        try:
            path.rename(beside)
        except OSError as error:
            return f"it stays where it is ({error.strerror})"
        return f"set aside as {beside.name}"
    return "it stays where it is"


def retain(folder: Path, keep: set[Path]) -> None:
    """Delete the checkpoints in a folder but these; one that is half deleted has another name."""
    for path in checkpoints_in(folder):
        if path not in keep:
            _delete(path)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed runs left half written or half deleted."""
    for path in folder.iterdir():
        if path.name.startswith((_UNFINISHED, _REMOVED)):
            _remove(path)


def locate(path: Path) -> Checkpoint:
    """Find the checkpoint that a user names: its directory, or a run's, for its newest good one.

    Nothing is set aside.

    Raises:
        CheckpointError: where there is none, or the one that was named is damaged.
        EnvironmentFault: where a file cannot be read.
    """
    with _readable(path):
        return _locate(path)


def _locate(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path} (looked in {Path.cwd()})", _known(path.parent))
    if (path / RECORD_FILE).exists() or _NAME.fullmatch(path.name):
        try:
            return verify(path)
        except Damage as damage:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {damage}", _known(path.parent, other_than=path)
            ) from None
    problems = []
    for folder in (path / "checkpoints", path):
        for candidate in reversed(checkpoints_in(folder)):
            try:
                return verify(candidate)
            except Damage as damage:
                problems.append(f"{candidate.name}: {damage}")
    found = "no good checkpoint in" if problems else "no checkpoint in"
    raise CheckpointError(
        "; ".join([f"{found} {path}", *problems[:4]]),
        "Give a run directory, or a directory such as RUN_DIR/checkpoints/step-00000120.",
    )


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Context in which what the system refuses is the environment's fault, and named so."""
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"cannot read the checkpoint {path}: {error.strerror or error}",
            "Nothing was changed. Mend the disk or the permissions and start again.",
        ) from None


def _known(folder: Path, other_than: Path | None = None) -> str:
    paths = [path for path in checkpoints_in(folder) if path != other_than]
    return f"Beside it: {', '.join(path.name for path in paths[-4:])}." if paths else ""


def _write_arrays(path: Path, arrays: PortableState) -> FileFacts:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # the library writes an array's memory as it lies there, whatever its strides
    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    try:
        save_file(in_order, path)
    except SafetensorError as error:
        raise _as_os_error(error, path) from None
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library's files are the owner's alone
    _sync(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileFacts(sha256=digest, bytes=path.stat().st_size)


def _as_os_error(error: Exception, path: Path) -> OSError:
    """Turn the library's error, which has the system's number in its text, into Python's."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else OSError(str(error))


def _read_arrays(path: Path) -> PortableState:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays: PortableState = load_file(path)
    except (SafetensorError, KeyError) as error:
        raise Damage(f"{path.name}: {error}") from None
    return arrays


def _check_file(path: Path, facts: FileFacts | None) -> None:
    if facts is None:
        raise Damage(f"{RECORD_FILE} does not list {path.name}")
    size = path.stat().st_size
    if size != facts.bytes:
        raise Damage(f"{path.name} has {size:,} bytes, of {facts.bytes:,}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != facts.sha256:
            raise Damage(f"the content of {path.name} has changed")


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    removed = path.with_name(f"{_REMOVED}{path.name}")
    path.rename(removed)
    _remove(removed)


def _remove(path: Path) -> None:
    """Remove a directory with all that is in it, or a file or link of that name, as far as it goes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
