"""The run directory as the job opened it, which somebody may remove or replace while the job trains."""

import os
import threading
from collections.abc import Callable
from pathlib import Path


class RunFolder:
    """The run directory of a job, which is open as long as the job runs.

    If it is removed, it is made anew. If another directory has its name, nothing is written to that one: it
    may be another job's. Its methods may be called in any thread.

    Args:
        path: the directory.
        on_made_anew: called with the path when the directory was made anew.
        lost_lease: returns why this process may no longer write files; empty while it may.
        lost_lock: returns who else has the lock of the directory; empty while this job has it.

    Attributes:
        replaced: what happened to the directory, in words, if another one has its name; empty otherwise.

    Raises:
        OSError: If it cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        on_made_anew: Callable[[Path], None] = lambda path: None,
        lost_lease: Callable[[], str] = lambda: "",
        lost_lock: Callable[[], str] = lambda: "",
    ) -> None:
        self.replaced = ""
        self.lost_lease, self.lost_lock = lost_lease, lost_lock
        self._path = path
        self._on_made_anew = on_made_anew
        self._lock = threading.Lock()
        self._notes: list[str] = []
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check(self) -> Path | None:
        """Look whether the directory is still in its place, and make it anew if there is none.

        Returns:
            Where to write: the directory's path, or the one that it was moved to if another has its name;
            None if it was removed and another has its name, or if this process may not write.
        """
        if not self.may_write():
            return None
        with self._lock:
            try:
                if not self.replaced and not self._is_at(self._path):
                    self._make_anew()
            except OSError:  # no decision: writing will tell
                return self._path
            if not self.replaced:
                return self._path
            moved = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            return moved if self._is_at(moved) else None

    def may_write(self) -> bool:
        """Return whether this process may write files now."""
        return not (self.lost_lease() or self.lost_lock())

    def why_not(self) -> str:
        """Return why ``check`` gives no place to write to, in words; empty if it gives one."""
        return self.lost_lease() or self.lost_lock() or self.replaced

    def take_notes(self) -> list[str]:
        """Return what to tell the user since the last call."""
        with self._lock:
            notes, self._notes = self._notes, []
            return notes

    def close(self) -> None:
        """Close the directory."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _is_at(self, path: Path) -> bool:
        try:
            there = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def _make_anew(self) -> None:
        """Make the directory anew, or take an empty one that has its name.

        Raises:
            OSError: If it can be neither made nor read.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        if any(self._path.iterdir()):
            self.replaced = f"the run directory {self._path} was replaced by another one while training"
            return
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._on_made_anew(self._path)
        self._notes.append(
            f"the run directory {self._path} was removed while training; it is made anew, without the "
            "checkpoints that it had"
        )
