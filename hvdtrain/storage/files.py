"""Files that somebody else may have made: pipes and devices, which may never end, are refused."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


class NotAFileError(OSError):
    """A path is a pipe or a device, or a file that is too large for what it should hold."""


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        NotAFileError: If it is a pipe, a device or a folder.
        OSError: If there is none.
    """
    return _size_of(path, path.stat())


def open_regular(path: Path, follow: bool = True) -> BufferedReader:
    """Open a file for reading.

    Args:
        path: the file.
        follow: whether it can be a symbolic link.

    Raises:
        NotAFileError: If it is a pipe, a device or a folder, or a link that must not be followed.
        OSError: If it cannot be opened.
    """
    if not follow and path.is_symlink():
        raise not_followed(path)
    regular_size(path)  # before it is opened: a device may do something then
    # it may have been replaced since: a pipe is not waited for
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        _size_of(path, os.fstat(file))
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        NotAFileError: If it is a pipe, a device or a folder, or has more bytes than that.
        OSError: If it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
        size = max(len(content), os.fstat(file.fileno()).st_size)
    if size > limit_bytes:
        raise NotAFileError(f"{path.name} has {size:,} bytes; at most {limit_bytes:,} are expected")
    return content


def read_tail(path: Path, limit_bytes: int) -> bytes:
    """Return the last bytes of a file, up to that many; raises as ``read_regular`` does."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit_bytes))
        return file.read(limit_bytes)


def check_link(folder: Path, root: Path) -> None:
    """Check that a folder in another one is no symbolic link that leads out of it.

    Raises:
        NotAFileError: If it is one.
    """
    if folder.is_symlink() and not folder.resolve().is_relative_to(root.resolve()):
        raise NotAFileError(
            errno.ELOOP, f"it is a link that leads out of {root}, which is not followed", str(folder)
        )


def not_followed(path: Path) -> NotAFileError:
    """Return the error that says of a symbolic link that it is not followed."""
    return NotAFileError(errno.ELOOP, "it is a link, which is not followed", str(path))


def _size_of(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(f"{path.name} is not a regular file")
    return status.st_size
