"""Files that grow by whole records, whatever the disk does, and logs that are cut back on resuming."""

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.regular_files import not_followed, open_regular

_LONGEST_LINE = 1 << 26  # bytes; a trace has the indices of a step's samples in one line


class AppendFile:
    """A file that whole records are appended to.

    A record that cannot be written, on a full disk for instance, leaves nothing of itself behind. It
    waits in memory and is written before the next one.

    Args:
        path: the file; made if need be.
        follow: whether it can be a symbolic link, a pipe or a device. In a run directory that came from
            somebody else, a link may lead to any file of the user, and a pipe may have no reader.

    Raises:
        OSError: If it cannot be opened.
    """

    def __init__(self, path: Path, follow: bool = False) -> None:
        self.path = path
        self._descriptor: int | None = _open_to_append(path, follow)
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


def _open_to_append(path: Path, follow: bool) -> int:
    """Return the descriptor of a file that is opened to append to it, and made if need be.

    Raises:
        OSError: If it cannot be opened, or is a link, a pipe or a device and ``follow`` is not set.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    if follow:
        return os.open(path, flags, 0o666)
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise not_followed(path) from None
        if error.errno == errno.ENXIO:  # a pipe without a reader
            raise OSError(errno.EINVAL, "it is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


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
    if all(_is_kept(line, step) for line in _lines_of(path)):
        return
    if step == 0:
        path.replace(path.with_name(path.name + ".old"))
        return
    _write_parts(path, (line for line in _lines_of(path) if _is_kept(line, step)))


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or, where there is no room for instance, leave what is there as it is.

    Raises:
        OSError: If it cannot be written.
    """
    _write_parts(path, [text.encode()])


def _write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file of these parts whole, or leave what is there as it is."""
    beside = path.with_name(path.name + ".new")
    try:
        beside.unlink(missing_ok=True)  # left by a killed run, or a link to somewhere else
        with beside.open("xb") as file:
            file.writelines(parts)
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


def _lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a log.

    Raises:
        OSError: If it cannot be read, is no regular file, or has a line that none of hvdtrain's can be.
    """
    with open_regular(path, follow=False) as file:
        while line := file.readline(_LONGEST_LINE + 1):
            if len(line) > _LONGEST_LINE:
                raise OSError(errno.EINVAL, f"it has a line of more than {_LONGEST_LINE:,} bytes", str(path))
            yield line


def _is_kept(line: bytes, last_step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        step = json.loads(line.decode()).get("step")
    except (ValueError, AttributeError, RecursionError):
        return False
    return isinstance(step, int) and step <= last_step
