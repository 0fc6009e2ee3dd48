"""The working copy of a run directory at a URL: what it holds, and whether the store went on without it."""

import fcntl
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.remote.stored_checkpoints import FOLDER
from hvdtrain.errors import EnvironmentFault
from hvdtrain.reporting.jsonl import write_json
from hvdtrain.reporting.lock_state import LOCK_FILE
from hvdtrain.storage.files import read_regular

SCRATCH = ".store"
RUN_FILES = ("metrics.jsonl", "summary.json", FOLDER)  # if a directory has one of them, it holds a run
_STATE, _LOCK = "state.json", "upload.lock"
_MAX_BYTES = 1 << 16
_LOCK_SECONDS = 90.0
_LOOK_SECONDS = 0.2


@dataclass
class CopyState:
    """What a working copy knows of the store; ``.store/state.json``.

    Attributes:
        url: the run directory.
        writers: claims of the last jobs that changed the run in the store and whose work is here.
        is_uploaded: whether the store had all that is here when the last job here ended.
        later: checkpoints in the store that are of a later step than the run went back to, and are to be set
            aside there before anything is uploaded.
    """

    url: str = ""
    writers: list[str] = field(default_factory=list)
    is_uploaded: bool = False
    later: list[str] = field(default_factory=list)


class WorkingCopy:
    """The working copy of a run directory at a URL. One process at a time uploads it.

    Args:
        folder: the directory; it exists.

    Attributes:
        scratch: a folder in it for what is not part of the run.
        state: what it knows of the store.

    Raises:
        OSError: If it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch = folder, folder / SCRATCH
        self.scratch.mkdir(exist_ok=True)
        self._lock = os.open(self.scratch / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.state = self._read()

    def lock(self) -> None:
        """Wait until the process of the job before has ended, which uploads what is left.

        Raises:
            EnvironmentFault: If it does not end.
        """
        until_seconds = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            except OSError:  # a file system without locks
                break
            if time.monotonic() > until_seconds:
                raise EnvironmentFault(
                    f"the job before still uploads {self.folder}", "Wait until its process has ended."
                )
            time.sleep(_LOOK_SECONDS)
        self.state = self._read()

    def unlock(self) -> None:
        """Let other processes upload it."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def write_state(self) -> None:
        """Write down what it knows of the store.

        Raises:
            OSError: If it cannot be written.
        """
        write_json(self.scratch / _STATE, asdict(self.state))

    def holds_run(self) -> bool:
        """Return whether there is a run in it."""
        return any((self.folder / name).exists() for name in RUN_FILES)

    def steps(self) -> list[str]:
        """Return the names of the checkpoints in it, good or not, the newest last."""
        return [path.name for path in storage.checkpoints_in(self.folder / FOLDER)]

    def move_aside(self) -> Path:
        """Move the run in it to a directory beside it, which is returned.

        Raises:
            OSError: If it cannot be moved.
        """
        number = 1
        while (beside := self.folder.with_name(f"{self.folder.name}-set-aside-{number}")).exists():
            number += 1
        beside.mkdir()
        for path in self._content():
            path.rename(beside / path.name)
        return beside

    def _content(self) -> Sequence[Path]:
        return [path for path in self.folder.iterdir() if path.name not in (SCRATCH, LOCK_FILE)]

    def _read(self) -> CopyState:
        with suppress(OSError, ValueError, TypeError, RecursionError):
            return CopyState(**json.loads(read_regular(self.scratch / _STATE, _MAX_BYTES)))
        return CopyState()
