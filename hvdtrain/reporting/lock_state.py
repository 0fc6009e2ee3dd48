"""Lock files: one holder at a time, and who uses a run directory, as the lock file in it says."""

import errno
import fcntl
import json
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.reporting.jsonl import open_no_link
from hvdtrain.storage.files import open_regular

LOCK_FILE = ".lock"
HOLDER_BYTES = 4096  # that a lock file has at most
HELD = (errno.EACCES, errno.EAGAIN)  # numbers of the error if somebody else holds the lock
_FLOCK = "hhqqi4x"  # C's struct flock on Linux: type, whence, start, length, process
_WHOLE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_open: set[int] = set()  # lock files of this process


def open_lock(path: Path) -> int:
    """Return the descriptor of a lock file, which is made if need be; ``close_lock`` closes it."""
    file = open_no_link(path, os.O_CREAT | os.O_CLOEXEC)
    _open.add(file)
    return file


def take_lock(file: int) -> OSError | None:
    """Lock a file if nobody else holds its lock; return why it is not locked.

    The lock is one of the open file: unlike one of the process, it stays if other code of the process opens
    and closes the file. It works over NFS.
    """
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _WHOLE)
    except OSError as error:
        return error
    return None


def close_lock(file: int) -> None:
    """Close a lock file, which gives the lock back. A forked process has none to close."""
    if file in _open:
        _open.remove(file)
        os.close(file)


def _close_all() -> None:
    for file in tuple(_open):
        close_lock(file)


os.register_at_fork(after_in_child=_close_all)  # or a forked process that lives longer keeps the lock


@dataclass(frozen=True)
class LockState:
    """Who uses a run directory, as somebody sees it who does not."""

    is_held: bool | None  # whether a job holds the lock; None if that cannot be found out
    process: int = 0  # the process that held it last; 0 if it is not known
    host: str = ""  # the host of that process
    since: str = ""  # when it took the lock, in ISO 8601
    changed_ns: int = 0  # when the lock file was written, by the clock of its file system; 0 if there is none

    @property
    def is_elsewhere(self) -> bool:
        """Whether the process is on another host, whose locks a shared folder may not show here."""
        return bool(self.host) and self.host != socket.gethostname()[:80]

    @property
    def is_free_here(self) -> bool:
        """Whether nobody holds the lock and a job of its host would be seen here."""
        return self.is_held is False and not self.is_elsewhere


def look_at_lock(run_dir: Path) -> LockState:
    """Return who uses a run directory. Nothing is locked, made or changed."""
    try:
        with open_regular(run_dir / LOCK_FILE, follow=False) as file:
            holder = Holder.of(file.read(HOLDER_BYTES))
            is_held = _is_locked(file.fileno())
            changed_ns = os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return LockState(None)
    return LockState(is_held, holder.process, holder.host, holder.since, changed_ns)


def _is_locked(file: int) -> bool | None:
    """Return whether somebody has locked a file; None if its file system does not say."""
    try:
        answer = fcntl.fcntl(file, fcntl.F_GETLK, _WHOLE)
    except OSError:
        return None
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names; empty if it names none."""

    process: int = 0
    host: str = ""
    since: str = ""
    job: str = ""
    generation: int = 0

    @classmethod
    def of(cls, content: bytes) -> "Holder":
        """Return what a lock file says."""
        try:
            found = json.loads(content)
            of_job = str(found.get("job", "")), int(found.get("generation", 0))
            return cls(int(found["pid"]), f"{found['host']!s:.80}", f"{found['since']!s:.40}", *of_job)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls()

    def precedes(self, job: str, generation: int) -> bool:
        """Return whether it is of an earlier world of a job."""
        return bool(job) and self.job == job and self.generation < generation

    def follows(self, job: str, generation: int) -> bool:
        """Return whether it is of a later world of a job."""
        return bool(job) and self.job == job and self.generation > generation

    def is_self(self) -> bool:
        """Return whether it is this process."""
        return self.process == os.getpid() and self.host == socket.gethostname()[:80]

    def describe(self) -> str:
        """Return who it is, as text that follows those of the message."""
        return f": process {self.process} on {self.host} since {self.since}" if self.host else ""

    def remedy(self, path: Path) -> str:
        """Return what to do if the holder's host, which is another one, is lost.

        A file server keeps the locks of a host that it lost until it learns of it; one on this host ends with
        its process.
        """
        if not self.host or self.host == socket.gethostname():
            return ""
        return f"If {self.host} is lost, and the file server still keeps its lock, remove {path}."
