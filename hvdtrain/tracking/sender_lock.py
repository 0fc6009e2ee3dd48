"""One sender at a time for a run and a tracker."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.reporting.lock_state import HELD, close_lock, open_lock, take_lock
from hvdtrain.tracking.folder import tracking_folder


@contextmanager
def lock_file(run_dir: Path, name: str) -> Iterator[int]:
    """Return a context with the descriptor of a lock file; when it ends, nobody holds the lock.

    Raises:
        OSError: If it can be neither made nor opened, or is not a regular file.
    """
    file = open_lock(tracking_folder(run_dir) / f"{name}.lock")
    try:
        yield file
    finally:
        close_lock(file)


def take(file: int) -> bool:
    """Take a lock; return whether no other process has it. A file system without locks keeps nobody out."""
    error = take_lock(file)
    return error is None or error.errno not in HELD
