"""One job at a time in a run directory: a lock that a second job meets with a message."""

import errno
import fcntl
import json
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from hvdtrain.errors import EnvironmentFault
from hvdtrain.regular_files import not_followed

LOCK_FILE = ".lock"
_HELD = {errno.EACCES, errno.EAGAIN}
_MAX_BYTES = 4096
_REMEDY = "Wait until it has ended or end it, or choose another --run-dir."


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
        file = _open(path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _Holder.of(os.read(file, _MAX_BYTES)) if error.errno in _HELD else _Holder()
            os.close(file)
            if error.errno in _HELD:
                raise EnvironmentFault(
                    f"run_dir: {run_dir} is in use by another job{holder.describe()}",
                    "\n".join(filter(None, [_REMEDY, holder.remedy(path)])),
                ) from None
            self.note = f"{run_dir} is not locked against other jobs: {error.strerror or error}"
            return
        self._file = file
        with suppress(OSError):  # on a full disk the lock holds without a name
            os.ftruncate(file, 0)
            os.write(file, _own().encode())

    def move(self, run_dir: Path) -> None:
        """Lock another directory in place of the one that is locked; raises as ``acquire`` does."""
        self.release()
        self.acquire(run_dir)

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


@dataclass(frozen=True)
class _Holder:
    """The process that a lock file names; empty if it names none."""

    process: int = 0
    host: str = ""
    since: str = ""

    @classmethod
    def of(cls, content: bytes) -> "_Holder":
        """Return what a lock file says."""
        try:
            found = json.loads(content)
            return cls(int(found["pid"]), f"{found['host']!s:.80}", f"{found['since']!s:.40}")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return cls()

    def describe(self) -> str:
        """Return who it is, in words that follow those of the message."""
        return f": process {self.process} on {self.host} since {self.since}" if self.host else ""

    def remedy(self, path: Path) -> str:
        """Return what to do if the holder's host, which is another one, is lost.

        A file server keeps the locks of a host that it lost until it learns of it; one on this host ends
        with its process.
        """
        if not self.host or self.host == socket.gethostname():
            return ""
        return f"If {self.host} is lost, and the file server still keeps its lock, remove {path}."


def _open(path: Path) -> int:
    """Return the descriptor of a lock file, which is made if need be.

    Raises:
        OSError: If it cannot be opened, or is not a regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        raise not_followed(path) if error.errno == errno.ELOOP and path.is_symlink() else error from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file
