"""Files that grow by whole records, whatever the disk does, and logs that are cut back on resuming."""

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class AppendFile:
    """A file that whole records are appended to.

    A record that cannot be written, on a full disk for instance, leaves nothing of itself behind. It
    waits in memory and is written before the next one.

    Args:
        path: the file; made if need be.
        follow: whether it can be a symbolic link. In a run directory that came from somebody else, a
            link may lead to any file of the user.

    Raises:
        OSError: If it cannot be opened.
    """

    def __init__(self, path: Path, follow: bool = False) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if follow else os.O_NOFOLLOW)
        try:
            self._descriptor: int | None = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP and path.is_symlink():
                raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from None
            raise
        self._size = os.fstat(self._descriptor).st_size
        self._waiting = b""

    def append(self, record: bytes) -> OSError | None:
        """Append a record; return what went wrong, if something did."""
        assert self._descriptor is not None  # not closed
        self._waiting += record
        written = 0
        try:
            while written < len(self._waiting):
                written += os.write(self._descriptor, self._waiting[written:])
        except OSError as error:
            try:
                os.ftruncate(self._descriptor, self._size)
            except OSError:  # a disk that takes no writes at all: what is there already is not written again
                self._written(written)
            return error
        self._written(written)
        return None

    def _written(self, count: int) -> None:
        self._size += count
        self._waiting = self._waiting[count:]

    def sync(self) -> None:
        """Wait until what was appended is on the disk.

        Raises:
            OSError: If that cannot be.
        """
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Write what waits, if that can be now, and close the file; nothing if it is closed."""
        if self._descriptor is not None:
            if self._waiting:
                self.append(b"")
            os.close(self._descriptor)
            self._descriptor = None


def finite(value: Any) -> Any:
    """Return a value, or the values of a mapping, as JSON has them: None for a number that is not finite."""
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON that every reader takes: null stands for a number that is not finite."""
    return json.dumps(finite(values), indent=indent, allow_nan=False)


def cut_log(path: Path, step: int) -> None:
    """Keep the lines of a JSON-lines log up to a step, and drop one that was not written out.

    Args:
        path: the log, each of whose lines has a ``step``.
        step: the last step to keep; 0 keeps nothing, and the log is renamed to ``*.old`` instead.

    Raises:
        OSError: If it cannot be rewritten.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if (found := _step_of(line)) is not None and found <= step]
    if len(kept) == len(lines):
        return
    if step == 0:
        path.replace(path.with_name(path.name + ".old"))
        return
    write_whole(path, "".join(kept))


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or, where there is no room for instance, leave what is there as it is.

    Raises:
        OSError: If it cannot be written.
    """
    beside = path.with_name(path.name + ".new")
    try:
        beside.unlink(missing_ok=True)  # left by a killed run, or a link to somewhere else
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file whole.

    Raises:
        OSError: If it cannot be written; what was there stays.
    """
    write_whole(path, to_json(values, indent=2) + "\n")


def _step_of(line: str) -> int | None:
    if not line.endswith("\n"):
        return None
    try:
        step = json.loads(line).get("step")
    except (ValueError, AttributeError):
        return None
    return step if isinstance(step, int) else None
