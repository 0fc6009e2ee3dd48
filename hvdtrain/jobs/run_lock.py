"""One job at a time in a run directory: a lock that a second job meets with a message."""

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from hvdtrain.errors import EnvironmentFault

LOCK_FILE = ".lock"
_HELD = {errno.EACCES, errno.EAGAIN}
_MAX_BYTES = 4096


class RunLock:
    """The lock of one run directory, which the system releases when this process ends.

    It is a POSIX lock, since these work over NFS and a process that is forked does not inherit them. The
    file itself stays: it says who held the lock last.

    Attributes:
        note: why nothing is locked, if the file system has no locks; empty otherwise.
    """

    def __init__(self) -> None:
        self.note = ""
        self._file: int | None = None

    def acquire(self, run_dir: Path) -> None:
        """Lock a run directory; do nothing if this object has locked it.

        Raises:
            EnvironmentFault: If another job holds the lock, naming it.
            OSError: If the file cannot be made.
        """
        if self._file is not None:
            return
        path = run_dir / LOCK_FILE
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(os.read(file, _MAX_BYTES)) if error.errno in _HELD else ""
            os.close(file)
            if error.errno in _HELD:
                raise EnvironmentFault(
                    f"run_dir: {run_dir} is in use by another job{holder}",
                    "Wait until it has ended or end it, or choose another --run-dir.",
                ) from None
            self.note = f"{run_dir} is not locked against other jobs: {error.strerror or error}"
            return
        self._file = file
        with suppress(OSError):  # on a full disk the lock holds without a name
            os.ftruncate(file, 0)
            os.write(file, _own().encode())

    def release(self) -> None:
        """Let other jobs lock the directory."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.release()


def _own() -> str:
    """Return what the lock file says of this process."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n"


def _holder(content: bytes) -> str:
    """Return what a lock file says of the process that holds it, in words; empty if it says nothing."""
    try:
        found = json.loads(content)
        return f": process {int(found['pid'])} on {found['host']!s:.80} since {found['since']!s:.40}"
    except (ValueError, KeyError, TypeError):
        return ""
