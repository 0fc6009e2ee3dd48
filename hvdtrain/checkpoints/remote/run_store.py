"""What a job has of a run directory at a URL: its working copy, and the process that uploads it."""

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints.remote.begin import SCRATCH, Begun
from hvdtrain.checkpoints.remote.claim import (
    BEGUN,
    FAILED,
    FLUSH,
    FLUSHED,
    NOTE,
    OVER,
    START,
    STATE,
    UploadState,
    decode,
    encode,
)
from hvdtrain.checkpoints.remote.stored_checkpoints import FOLDER, never_uploaded, step_in
from hvdtrain.checkpoints.saver import BackgroundSaver
from hvdtrain.errors import CheckpointError, ConfigError, EnvironmentFault, HvdtrainError
from hvdtrain.host.processes import kill_group, side_environment, start_group
from hvdtrain.reporting.report import Report
from hvdtrain.storage.urls import join, shown
from hvdtrain.workers.activity import ACTIVITY

_MODULE = "hvdtrain.checkpoints.remote.process"
_LOG = "upload.log"
_POLL_SECONDS = 0.05
_READ_BYTES = 1 << 16
_SAY_SECONDS = 10.0
_SILENT_SECONDS = 1800.0  # without a word before the job begins
_KINDS: dict[str, type[HvdtrainError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, EnvironmentFault)
}


class RunStore:
    """A run directory at a URL, for rank 0. Its process starts with ``begin``.

    Args:
        url: the run directory.
        folder: its working copy.
        options: further words for the process.

    Attributes:
        url: the run directory.
        folder: its working copy.
        state: how the uploads stood when the process was last heard.
        begun: where the run stood when the job began.
    """

    def __init__(self, url: str, folder: Path, options: Sequence[str] = ()) -> None:
        self.url, self.folder = url, folder
        self.state = UploadState()
        self.begun = Begun()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._text = b""
        self._notes: list[str] = []
        self._messages: dict[str, Any] = {}
        self._hearing = threading.Lock()  # the watch of the workers asks, too
        self._flushes, self._until_seconds = 0, math.inf
        self._ended, self._ended_seconds = "", 0.0

    @property
    def is_open(self) -> bool:
        """Whether its process was started, and not closed yet."""
        return self._process is not None

    def begin(self, resume: str, say: Callable[[str], None] = lambda text: None) -> Begun:
        """Claim the run directory and bring the working copy to where the run stands.

        Args:
            resume: as ``hvdtrain.checkpoints.remote.begin`` has it.
            say: is told what takes long.

        Raises:
            HvdtrainError: If that cannot be done.
            OSError: If the working copy cannot be written.
        """
        if self._process is not None:
            return self.begun
        self._process = self._start(resume)
        moved, since = -1, time.monotonic()
        while BEGUN not in self._messages:
            self._hear()
            for text in self.notes():
                since = time.monotonic()
                say(text)
            if found := self._messages.get(FAILED):
                self.close(0.0)
                raise _KINDS[found["kind"]](found["problem"], found["remedy"])
            if self._ended:
                raise EnvironmentFault(f"run_dir: {shown(self.url)}: {self._ended}")
            if self.state.moved_bytes != moved:
                moved, since = self.state.moved_bytes, time.monotonic()
                ACTIVITY.progress()
            if time.monotonic() - since > _SILENT_SECONDS:
                self.close(0.0)
                raise EnvironmentFault(f"run_dir: {shown(self.url)}: the store does not answer")
            time.sleep(_POLL_SECONDS)
        self.begun = Begun(**self._messages[BEGUN])
        return self.begun

    def start(self, step: int | None) -> None:
        """Begin to upload what the job writes.

        Args:
            step: the steps that are done if the run goes on in this directory.
        """
        self._tell(START, step)

    def refresh(self) -> None:
        """Bring ``state`` up to date."""
        self._hear()

    def notes(self) -> list[str]:
        """Return what to tell the user since the last call."""
        self._hear()
        found, self._notes = self._notes, []
        return found

    def flush(
        self, limits: Callable[[], tuple[float, float]], say: Callable[[str], None] = lambda text: None
    ) -> bool:
        """Wait until all that was written is whole in the store; return whether it is.

        Args:
            limits: returns for how many seconds to wait while nothing is taken by the store, and in all, from
                the first call with that number on. It may change.
            say: is told what is awaited, and what the process says.
        """
        if self._process is None or self.state.lost:
            return False
        self._flushes += 1
        self._tell(FLUSH, self._flushes)
        since = said = time.monotonic()
        moved = self.state.moved_bytes
        while True:
            for text in self.notes():
                say(text)
            if self._messages.get(FLUSHED) == self._flushes:
                return True
            now = time.monotonic()
            if self.state.moved_bytes != moved:
                moved, since = self.state.moved_bytes, now
                ACTIVITY.progress()
            if self._ended or self.state.lost:
                return False
            idle_seconds, most_seconds = limits()
            self._until_seconds = min(self._until_seconds, now + most_seconds)
            if now - since > idle_seconds or now > self._until_seconds:
                return False
            if now - said > _SAY_SECONDS:
                said = now
                say(f"uploading to {shown(self.url)}: {moved / 1e6:,.0f} MB so far{self._why()}")
            time.sleep(_POLL_SECONDS)

    def close(self, seconds: float) -> bool:
        """Tell the process that the job has ended, and wait for its end.

        Args:
            seconds: how long it may upload what is left.

        Returns:
            Whether the store has all that was written, and other jobs can have the run directory at once.
        """
        process, self._process = self._process, None
        if process is None:
            return True
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            os.write(process.stdin.fileno(), encode(OVER, seconds))
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):  # it ends by itself after some seconds more
            code = process.wait(seconds + 10.0)
        if code is None:
            kill_group(process)
        self._hear(process)
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        return code == 0

    def url_of(self, path: Path) -> str:
        """Return the URL of what has a path in the working copy; the path itself if it lies elsewhere."""
        with suppress(ValueError):
            return join(self.url, path.relative_to(self.folder).as_posix())
        return str(path)

    def newest(self) -> str | None:
        """Return the URL of the newest checkpoint of this job's working copy that is whole in the store."""
        names = sorted(self.state.whole, key=step_in)
        return join(self.url, FOLDER, names[-1]) if names else None

    def problem(self) -> str:
        """Return why not all that was written is in the store, in words."""
        reason = self.state.lost or self.state.problem or self._ended or "it was not uploaded in time"
        return f"not all of the run is in {shown(self.url)}: {reason}"

    def _why(self) -> str:
        return f" ({self.state.problem})" if self.state.problem else ""

    def _start(self, resume: str) -> subprocess.Popen[bytes]:
        scratch = self.folder / SCRATCH
        scratch.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(scratch / _LOG, flags, 0o666)
        try:
            words = [_MODULE, self.url, str(self.folder), f"--resume={resume}", *self._options]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            # its group outlives Ctrl-C, and a launcher that ends its workers
            process = start_group([sys.executable, "-m", *words], **pipes, env=side_environment())
        finally:
            os.close(log)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _tell(self, kind: str, value: Any) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended
                os.write(self._process.stdin.fileno(), encode(kind, value))

    def _hear(self, process: "subprocess.Popen[bytes] | None" = None) -> None:
        with self._hearing:
            self._hear_from(process or self._process)

    def _hear_from(self, process: "subprocess.Popen[bytes] | None") -> None:
        if process is None or process.stdout is None:
            return
        code = process.poll()
        with suppress(OSError):
            while found := os.read(process.stdout.fileno(), _READ_BYTES):
                self._text += found
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            with suppress(ValueError, TypeError, KeyError):
                kind, value = decode(line)
                if kind == NOTE:
                    self._notes.append(str(value))
                elif kind == STATE:
                    self.state = UploadState.parse(value)
                else:
                    self._messages[kind] = value
        if code is not None and process is self._process and not self._ended:
            self._ended_seconds = time.monotonic()
            self._ended = (
                f"the process that uploads ended with {code}; {self.folder / SCRATCH / _LOG} says why"
            )
            if BEGUN in self._messages and not self.state.lost:
                self._notes.append(
                    f"{shown(self.url)}: {self._ended}; nothing more is uploaded, and training continues in "
                    f"{self.folder}"
                )
        if self._ended:
            failing_seconds = time.monotonic() - self._ended_seconds
            self.state = replace(self.state, problem=self._ended, failing_seconds=failing_seconds)


_FEW_SECONDS = 2.0  # for what is left if the job has waited for it in vain
_FAILING_SECONDS = 120.0  # after which on_save_error: stop stops a job whose store does not answer


class UploadingSaver(BackgroundSaver):
    """The saver of rank 0 if the run directory is at a URL.

    Args:
        folder: where checkpoints lie in the working copy.
        report: where to say what a person should know.
        store: the run directory.
        stop_on_error: whether training should stop if a checkpoint cannot be written, or the store does not
            answer for long.
        options: as ``BackgroundSaver`` takes them.
    """

    def __init__(
        self, folder: Path, report: Report, store: RunStore, *, stop_on_error: bool = False, **options: Any
    ) -> None:
        super().__init__(folder, report, stop_on_error=stop_on_error, **options)
        self._store = store
        self._stops = stop_on_error
        self._has_given_up = False

    def poll(self) -> bool:
        """Report what was written or went wrong since the last call; return whether to stop for it."""
        stop = super().poll()
        if self.is_in_own_thread:
            for text in self._store.notes():
                self._report.note(text)
        if self._store.state.lost and not self.replaced:
            self.replaced = self._store.state.lost
        return stop or bool(self.replaced) or (self._stops and self._fails())

    def _fails(self) -> bool:
        return self._store.state.failing_seconds > _FAILING_SECONDS

    def publish(self, limits: Callable[[], tuple[float, float]]) -> str:
        """Wait until what was written is whole in the store; return why it is not."""
        if not self._has_given_up and self._store.flush(limits, self._report.note):
            return ""
        self._has_given_up = True
        return self._store.problem()

    def published(self) -> tuple[str | None, str | None]:
        """Return the newest checkpoint in the store, and why the newest one here is not there."""
        self._store.refresh()
        found = self._store.newest()
        if self.newest is None or self.newest.name in self._store.state.whole:
            return found, None
        return found, f"{self._store.problem()}; {self.newest} has the state of its step"

    def close(self, seconds: float) -> str:
        """End the uploads; return what the user should know, or nothing."""
        if not self._store.is_open:
            return ""
        if self._store.close(_FEW_SECONDS if self._has_given_up else seconds):
            if not self.is_complete:
                return ""
            if kept := never_uploaded(self._store.folder):
                return f"{self._store.folder} stays, as these are not in the store: {', '.join(kept[:4])}"
            shutil.rmtree(self._store.folder, ignore_errors=True)
            return ""
        where = f"{self._store.folder} on this host has all of it; the same command with --resume uploads it"
        return f"{self._store.problem()}; {where} to {shown(self._store.url)}"
