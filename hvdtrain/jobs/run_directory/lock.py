"""One job at a time in a run directory: a lock that a second job meets with a message."""

import json
import math
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from hvdtrain.errors import EnvironmentFault
from hvdtrain.reporting import lock_state
from hvdtrain.storage.files import read_regular

_LOOK_SECONDS = 1.0  # it may be a request to a file server
_REMEDY = "Wait until it has ended or end it, or choose another --run-dir."


class RunLock:
    """The lock of one run directory, which the system releases when this process ends.

    The file itself stays: it says who held the lock last.

    In an elastic job, the lock goes from one rank 0 to another. A worker that was given up, but keeps the
    lock because it is frozen or its host is cut off, does not keep out its successor; the file shows it, if
    it continues, that it has one.
    """

    def __init__(self) -> None:
        self.job = ""  # the name of the elastic job; empty if the number of workers is fixed
        self.generation = 0  # the number of the world that this worker is in; 0 if the number is fixed
        # why nothing is locked, or who keeps the lock, if it is not held as it should be; else empty
        self.note = ""
        self._file: int | None = None
        self._run_dir = Path()
        self._signed = 0
        self._looked_seconds, self._lost = -math.inf, ""
        self._looking = threading.Lock()

    def acquire(self, run_dir: Path) -> None:
        """Lock a run directory, or note a new generation there; EnvironmentFault names who holds the lock."""
        if self._file is not None:
            if self.generation != self._signed:
                self._sign(self._file)
            return
        path = run_dir / lock_state.LOCK_FILE
        file = lock_state.open_lock(path)
        reason = lock_state.take_lock(file)
        holder = lock_state.Holder.of(os.pread(file, lock_state.HOLDER_BYTES, 0))
        if holder.follows(self.job, self.generation):
            lock_state.close_lock(file)
            raise EnvironmentFault(f"run_dir: {run_dir} was taken over{holder.describe()}")
        if reason is not None and reason.errno in lock_state.HELD:
            if not holder.precedes(self.job, self.generation):
                lock_state.close_lock(file)
                # a file server keeps the locks of a host that it lost until it learns of it
                lost = f"\nIf {holder.host} is lost, and the file server still keeps its lock, remove {path}."
                raise EnvironmentFault(
                    f"run_dir: {run_dir} is in use by another job{holder.describe()}",
                    _REMEDY + lost * holder.is_elsewhere,
                )
            who = "a worker that is no longer in the job"
            self.note = f"{who} keeps the lock of {run_dir}{holder.describe()}"
        elif reason is not None:
            self.note = f"{run_dir} is not locked against other jobs: {reason.strerror or reason}"
            if not self.job:
                lock_state.close_lock(file)
                return
        self._file, self._run_dir = file, run_dir
        self._sign(file)

    def is_of_job(self, run_dir: Path) -> bool:
        """Return whether a run directory was last locked by a worker of this elastic job."""
        if not self.job:
            return False
        with suppress(OSError):
            text = read_regular(run_dir / lock_state.LOCK_FILE, lock_state.HOLDER_BYTES)
            return lock_state.Holder.of(text).job == self.job
        return False

    def lost(self) -> str:
        """Return which worker of this job, or which other job, took the directory over; empty if none did."""
        now_seconds = time.clock_gettime(time.CLOCK_BOOTTIME)  # continues while the process, or host, sleeps
        with self._looking:
            if self._file is None:
                return ""
            if now_seconds >= self._looked_seconds + _LOOK_SECONDS:
                self._looked_seconds, self._lost = now_seconds, self._look(self._file)
            return self._lost

    def _look(self, file: int) -> str:
        reason = lock_state.take_lock(file)  # which also makes a network file system look at the file anew
        try:
            holder = lock_state.Holder.of(os.pread(file, lock_state.HOLDER_BYTES, 0))
            is_removed = os.fstat(file).st_nlink == 0
        except OSError:  # a file server says so of a file that was removed
            holder, is_removed = lock_state.Holder(), True
        is_lost = reason is not None and reason.errno in lock_state.HELD
        if self.job:  # which a worker may keep out of its lock that is no longer in the job
            is_lost &= bool(holder.process) and not holder.is_self
        if is_removed:  # another job can lock a new file
            holder = lock_state.look_at_lock(self._run_dir)
            is_lost = holder.is_held is True or (holder.process != 0 and not holder.is_self)
        if is_lost or holder.follows(self.job, self.generation):
            return f"the run directory was taken over{holder.describe()}"
        return ""

    def _sign(self, file: int) -> None:
        """Write into the file who holds the lock."""
        self._signed, self._looked_seconds = self.generation, -math.inf
        values = {"pid": os.getpid(), "host": socket.gethostname()}
        values |= {"since": datetime.now(UTC).isoformat(timespec="seconds")}
        values |= {"job": self.job, "generation": self.generation} if self.job else {}
        content = (json.dumps(values) + "\n").encode()
        with suppress(OSError):  # on a full disk the lock holds without a name
            os.pwrite(file, content, 0)
            os.ftruncate(file, len(content))
            if self.job:  # workers on other hosts look there
                os.fsync(file)

    def release(self) -> None:
        """Let other jobs lock the directory."""
        with self._looking:
            if self._file is not None:
                lock_state.close_lock(self._file)
                self._file = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
