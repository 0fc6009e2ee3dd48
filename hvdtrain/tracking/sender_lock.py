"""One sender at a time for a run and a tracker."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.regular_files import regular_size
from hvdtrain.tracking.folder import tracking_folder

_HELD = (errno.EACCES, errno.EAGAIN)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextmanager
def lock_file(run_dir: Path, name: str) -> Iterator[int]:
    """Return a context with the descriptor of a lock file; when it ends, nobody holds the lock.

    Raises:
        OSError: If it can be neither made nor opened, or is not a regular file.
    """
    path = tracking_folder(run_dir) / f"{name}.lock"
    file = os.open(path, _FLAGS, 0o666)
    try:
        regular_size(path)
        yield file
    finally:
        os.close(file)


def take(file: int) -> bool:
    """Take a lock; return whether no other process has it. A file system without locks keeps nobody out."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD
    return True
