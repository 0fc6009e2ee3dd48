"""Who uses a run directory, as the lock file in it says. Nothing is locked here."""

import fcntl
import json
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.regular_files import open_regular

LOCK_FILE = ".lock"
HOLDER_BYTES = 4096  # that a lock file has at most
_FLOCK = "hhqqi4x"  # C's struct flock on Linux: type, whence, start, length, process


@dataclass(frozen=True)
class LockState:
    """Who uses a run directory, as somebody sees it who does not.

    Attributes:
        is_held: whether a job holds the lock; None if that cannot be found out.
        process: the process that held it last; 0 if it is not known.
        host: the host of that process.
        since: when it took the lock, in ISO 8601.
        changed_ns: when the lock file was written, by the clock of its file system; 0 if there is none.
    """

    is_held: bool | None
    process: int = 0
    host: str = ""
    since: str = ""
    changed_ns: int = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether the process is on another host, whose locks a shared folder may not show here."""
        return bool(self.host) and self.host != socket.gethostname()[:80]

    @property
    def is_free_here(self) -> bool:
        """Whether nobody holds the lock and a job of its host would be seen here."""
        return self.is_held is False and not self.is_elsewhere


def look_at_lock(run_dir: Path) -> LockState:
    """Return who uses a run directory. Nothing is locked, made or changed.

    Not to be called in a process that holds the lock, which reading the file would release.
    """
    try:
        with open_regular(run_dir / LOCK_FILE, follow=False) as file:
            holder = Holder.of(file.read(HOLDER_BYTES))
            is_held = _is_locked(file.fileno())
            changed_ns = os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return LockState(None)
    return LockState(is_held, holder.process, holder.host, holder.since, changed_ns)


def _is_locked(file: int) -> bool | None:
    """Return whether another process has locked a file; None if its file system does not say."""
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(file, fcntl.F_GETLK, query)
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
