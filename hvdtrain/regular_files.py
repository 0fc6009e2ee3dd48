"""Reading files that somebody else may have made: pipes and devices, which may never end, are refused."""

import stat
from pathlib import Path


class NotAFileError(OSError):
    """A path is a pipe or a device, or a file that is too large for what it should hold."""


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        NotAFileError: If it is a pipe, a device or a folder.
        OSError: If there is none.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(f"{path.name} is not a regular file")
    return status.st_size


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        NotAFileError: If it is a pipe, a device or a folder, or has more bytes than that.
        OSError: If it cannot be read.
    """
    if (size := regular_size(path)) > limit_bytes:
        raise NotAFileError(f"{path.name} has {size:,} bytes; at most {limit_bytes:,} are expected")
    return path.read_bytes()


def read_tail(path: Path, limit_bytes: int) -> bytes:
    """Return the last bytes of a file, up to that many; raises as ``read_regular`` does."""
    size = regular_size(path)
    with path.open("rb") as file:
        file.seek(max(0, size - limit_bytes))
        return file.read(limit_bytes)
