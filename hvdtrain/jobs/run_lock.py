"""One job at a time in a run directory: a lock that a second job meets with a message."""

import errno
import fcntl
import json
import math
import os
import socket
import stat
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from hvdtrain.errors import EnvironmentFault
from hvdtrain.regular_files import not_followed, read_regular
from hvdtrain.reporting.lock_state import HOLDER_BYTES, LOCK_FILE, Holder

_HELD = {errno.EACCES, errno.EAGAIN}
_LOOK_SECONDS = 1.0
_REMEDY = "Wait until it has ended or end it, or choose another --run-dir."


class RunLock:
    """The lock of one run directory, which the system releases when this process ends.

    It is a POSIX lock, since these work over NFS and a process that is forked does not inherit them. The
    file itself stays: it says who held the lock last.

    In an elastic job, the lock goes from one rank 0 to another. A worker that was given up, but keeps the
    lock because it is frozen or its host is cut off, does not keep out its successor; the file tells it, if
    it goes on, that it has one.

    Attributes:
        job: the name of the elastic job; empty if the number of workers is fixed.
        generation: the number of the world that this worker is in; 0 if the number is fixed.
        note: why nothing is locked, or who keeps the lock, if it is not held as it should be; else empty.
    """

    def __init__(self) -> None:
        self.job = ""
        self.generation = 0
        self.note = ""
        self._file: int | None = None
        self._signed = 0
        self._looked_seconds, self._lost = -math.inf, ""

    def acquire(self, run_dir: Path) -> None:
        """Lock a run directory; if this object has locked it, only note there a new generation.

        Raises:
            EnvironmentFault: If another job holds the lock, naming it, or a later world of this job.
            OSError: If the file cannot be made.
        """
        if self._file is not None:
            if self.generation != self._signed:
                self._sign(self._file)
            return
        path = run_dir / LOCK_FILE
        file = _open(path)
        reason = _lock(file)
        holder = Holder.of(os.pread(file, HOLDER_BYTES, 0))
        if holder.follows(self.job, self.generation):
            os.close(file)
            raise EnvironmentFault(f"run_dir: {run_dir} was taken over{holder.describe()}")
        if reason is not None and reason.errno in _HELD:
            if not holder.precedes(self.job, self.generation):
                os.close(file)
                raise EnvironmentFault(
                    f"run_dir: {run_dir} is in use by another job{holder.describe()}",
                    "\n".join(filter(None, [_REMEDY, holder.remedy(path)])),
                )
            self.note = (
                f"a worker that is no longer in the job keeps the lock of {run_dir}{holder.describe()}"
            )
        elif reason is not None:
            self.note = f"{run_dir} is not locked against other jobs: {reason.strerror or reason}"
            if not self.job:
                os.close(file)
                return
        self._file = file
        self._sign(file)

    def is_of_job(self, run_dir: Path) -> bool:
        """Return whether a run directory was last locked by a worker of this elastic job.

        Not to be called while this object holds the lock, which reading the file would release.
        """
        if not self.job:
            return False
        with suppress(OSError):
            return Holder.of(read_regular(run_dir / LOCK_FILE, HOLDER_BYTES)).job == self.job
        return False

    def lost(self) -> str:
        """Return which worker of this job, or which other job, took the directory over; empty if none did.

        It looks at most once a second: that may be a request to a file server, and a worker that has a
        successor was given up longer ago.
        """
        if self._file is None or not self.job:
            return ""
        now_seconds = time.clock_gettime(
            time.CLOCK_BOOTTIME
        )  # goes on while the process, or the host, sleeps
        if now_seconds >= self._looked_seconds + _LOOK_SECONDS:
            self._looked_seconds, self._lost = now_seconds, self._look(self._file)
        return self._lost

    def _look(self, file: int) -> str:
        reason = _lock(file)  # this also makes a network file system look whether the file has changed
        holder = Holder.of(os.pread(file, HOLDER_BYTES, 0))
        is_held = reason is not None and reason.errno in _HELD
        if holder.follows(self.job, self.generation) or (is_held and holder.process and not holder.is_self()):
            return f"the run directory was taken over{holder.describe()}"
        return ""

    def _sign(self, file: int) -> None:
        """Write into the file who holds the lock."""
        self._signed, self._looked_seconds = self.generation, -math.inf
        content = _own(self.job, self.generation).encode()
        with suppress(OSError):  # on a full disk the lock holds without a name
            os.pwrite(file, content, 0)
            os.ftruncate(file, len(content))
            if self.job:  # workers on other hosts look there
                os.fsync(file)

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


def _lock(file: int) -> OSError | None:
    """Lock a file if nobody else holds its lock; return why it is not locked."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


def _own(job: str, generation: int) -> str:
    """Return what the lock file says of this process."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    of_job = {"job": job, "generation": generation} if job else {}
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since, **of_job}) + "\n"


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
