"""Files that grow by whole records, whatever the disk does, and logs that are cut back on resuming."""

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.storage.files import not_followed, open_regular

LONGEST_LINE = 1 << 26  # bytes; a trace has the indices of a step's samples in one line


class AppendFile:
    """A file that whole records are appended to; it is made if need be.

    A record that cannot be written, on a full disk for instance, leaves nothing of itself behind. It waits in
    memory and is written before the next one. Records also wait while ``may_write`` returns False. Unless
    ``follow`` is set, the file can be no symbolic link, pipe or device: a run directory may come from
    somebody else, and a link in it may lead to any file of the user.
    """

    def __init__(
        self, path: Path, follow: bool = False, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        self.path = path
        self._may_write = may_write
        flags = os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor: int | None = (
            os.open(path, flags | os.O_WRONLY, 0o666) if follow else open_no_link(path, flags)
        )
        # one attribute, so that a signal's exception cannot come between its parts
        self._size_and_waiting = (os.fstat(self._descriptor).st_size, b"")

    def append(self, record: bytes) -> OSError | None:
        """Append a record; return what went wrong, if something did."""
        assert self._descriptor is not None  # not closed
        size, waiting = self._size_and_waiting
        waiting += record
        self._size_and_waiting = size, waiting
        if not self._may_write():
            return None
        written = 0
        try:
            while written < len(waiting):
                written += os.write(self._descriptor, waiting[written:])
            self._size_and_waiting = size + written, b""
        except OSError as error:
            try:
                os.ftruncate(self._descriptor, size)
            except OSError:  # a disk that takes no writes at all: what is there already is not written again
                self._size_and_waiting = size + written, waiting[written:]
            return error
        except BaseException:  # a signal's: the file alone knows what was written
            written = os.fstat(self._descriptor).st_size - size
            self._size_and_waiting = size + written, waiting[written:]
            raise
        return None

    def sync(self) -> None:
        """Wait until what was appended is on the disk. May be called in another thread."""
        if (descriptor := self._descriptor) is not None:
            try:
                os.fsync(descriptor)
            except OSError:
                if descriptor == self._descriptor:  # it was not closed meanwhile
                    raise

    def close(self) -> None:
        """Write what waits, if that can be now, and close the file; nothing if it is closed."""
        if self._descriptor is not None:
            if self._size_and_waiting[1]:
                self.append(b"")
            os.close(self._descriptor)
            self._descriptor = None


def open_no_link(path: Path, flags: int) -> int:
    """Return the descriptor of a regular file; OSError if it is a link, a pipe or a device."""
    try:
        descriptor = os.open(path, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise not_followed(path) if error.errno == errno.ELOOP and path.is_symlink() else error from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def finite(value: Any) -> Any:
    """Return a value, or the values of a mapping, as JSON has them: None for a number that is not finite."""
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flattened(values: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of nested mappings; the names of a mapping in another one follow its own."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON that every reader takes: null stands for a number that is not finite."""
    return json.dumps(finite(values), indent=indent, allow_nan=False)


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or, where there is no room for instance, leave what is there as it is."""
    write_parts(path, [text.encode()])


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file of these parts whole, or leave what is there as it is."""
    beside = path.with_name(path.name + ".new")
    try:
        beside.unlink(missing_ok=True)  # left by a killed run, or a link to somewhere else
        with beside.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Wait until the entries of a directory are on the disk, if its file system can say so."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file whole."""
    write_whole(path, to_json(values, indent=2) + "\n")


def lines_of(path: Path, follow: bool = False) -> Iterator[bytes]:
    """Yield the lines of a log."""
    with open_regular(path, follow=follow) as file:
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise OSError(errno.EINVAL, f"it has a line of more than {LONGEST_LINE:,} bytes", str(path))
            yield line
