"""Lock files: one holder at a time, and who uses a run directory, as the lock file in it says."""

import errno
import fcntl
import json
import os
import socket
import struct
from contextlib import suppress
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
class Holder:
    """Who holds or held the lock of a run directory, as its lock file says; empty if it names nobody."""

    process: int = 0
    host: str = ""
    since: str = ""  # when it took the lock, in ISO 8601
    job: str = ""  # the name of its elastic job; empty if the number of workers is fixed
    generation: int = 0
    is_held: bool | None = None  # whether somebody holds the lock; None if that is not known
    changed_ns: int = 0  # when the lock file was written, by the clock of its file system; 0 if there is none

    @classmethod
    def of(cls, content: bytes, is_held: bool | None = None, changed_ns: int = 0) -> "Holder":
        """Return what a lock file says."""
        with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            found = json.loads(content)
            who = int(found["pid"]), f"{found['host']!s:.80}", f"{found['since']!s:.40}"
            return cls(*who, str(found.get("job", "")), int(found.get("generation", 0)), is_held, changed_ns)
        return cls(is_held=is_held, changed_ns=changed_ns)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the process is on another host, whose locks a shared folder may not show here."""
        return bool(self.host) and self.host != socket.gethostname()[:80]

    @property
    def is_free_here(self) -> bool:
        """Whether nobody holds the lock and a job of its host would be seen here."""
        return self.is_held is False and not self.is_elsewhere

    @property
    def is_self(self) -> bool:
        """Whether it is this process."""
        return self.process == os.getpid() and not self.is_elsewhere

    def precedes(self, job: str, generation: int) -> bool:
        """Return whether it is of an earlier world of a job."""
        return bool(job) and self.job == job and self.generation < generation

    def follows(self, job: str, generation: int) -> bool:
        """Return whether it is of a later world of a job."""
        return bool(job) and self.job == job and self.generation > generation

    def describe(self) -> str:
        """Return who it is, as text that follows those of the message."""
        return f": process {self.process} on {self.host} since {self.since}" if self.host else ""


def look_at_lock(run_dir: Path) -> Holder:
    """Return who uses a run directory. Nothing is locked, made or changed."""
    try:
        with open_regular(run_dir / LOCK_FILE, follow=False) as file:
            content, changed_ns, is_held = file.read(HOLDER_BYTES), os.fstat(file.fileno()).st_mtime_ns, None
            with suppress(OSError):  # of a file system that does not say
                answer = fcntl.fcntl(file.fileno(), fcntl.F_GETLK, _WHOLE)
                is_held = bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
            return Holder.of(content, is_held, changed_ns)
    except OSError:
        return Holder()
