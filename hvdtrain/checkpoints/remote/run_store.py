"""What a job has of a run directory at a URL: its working copy, and the process that uploads it."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints.remote.begin import SCRATCH, Begun
from hvdtrain.checkpoints.remote.process import FLUSH, OVER, START
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


@dataclass(frozen=True)
class UploadState:
    """How the uploads are.

    Attributes:
        whole: names of the checkpoints that are whole in the store.
        problem: why nothing can be uploaded now; empty if it can.
        lost: why nothing is uploaded any more: another job has the run directory; empty otherwise.
        moved_bytes: what was moved so far, to and from the store; what was moved again counts once.
        failing_seconds: for how long nothing could be uploaded.
    """

    whole: list[str] | tuple[str, ...] = ()
    problem: str = ""
    lost: str = ""
    moved_bytes: int = 0
    failing_seconds: float = 0.0


class RunStore:
    """A run directory at a URL, for rank 0. Its process starts with ``begin``.

    Args:
        url: the run directory.
        folder: its working copy.
        options: which checkpoints are kept in the store: ``keep_last``, ``keep_best`` and ``spared``.

    Attributes:
        url, folder: the run directory and its working copy.
        state: how the uploads were at the last report of the process.
        begun: where the run stood when the job began.
    """

    def __init__(self, url: str, folder: Path, **options: Any) -> None:
        self.url, self.folder = url, folder
        self.state, self.begun = UploadState(), Begun()
        self._options = {"keep_last": None, "keep_best": None, "spared": [], **options}
        self._process: subprocess.Popen[bytes] | None = None
        self._text = b""
        self._notes: list[str] = []
        self._news: dict[str, Any] = {}
        self._reading = threading.Lock()  # the watch of the workers reads, too
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
            say: called with what takes long.

        Raises:
            HvdtrainError: If that cannot be done.
            OSError: If the working copy cannot be written.
        """
        if self._process is not None:
            return self.begun
        self._process = self._started(resume)
        moved, since = -1, time.monotonic()
        while "begun" not in self._news:
            for text in self.notes():
                since = time.monotonic()
                say(text)
            if found := self._news.get("failed"):
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
        self.begun = Begun(**self._news["begun"])
        return self.begun

    def start(self, step: int | None) -> None:
        """Begin to upload what the job writes.

        Args:
            step: the steps that are done if the run continues in this directory.
        """
        self._send(START, step)

    def notes(self) -> list[str]:
        """Bring ``state`` up to date; return what the user should know since the last call."""
        with self._reading:
            self._read(self._process)
            found, self._notes = self._notes, []
        return found

    def flush(
        self, limits: Callable[[], tuple[float, float]], say: Callable[[str], None] = lambda text: None
    ) -> bool:
        """Wait until all that was written is whole in the store; return whether it is.

        Args:
            limits: returns for how many seconds to wait while nothing is taken by the store, and in all, from
                the first call with that number on. It may change.
            say: called with what is awaited, and what the process notes.
        """
        if self._process is None or self.state.lost:
            return False
        self._flushes += 1
        self._send(FLUSH, self._flushes)
        since = said = time.monotonic()
        moved = self.state.moved_bytes
        while True:
            for text in self.notes():
                say(text)
            if self._news.get("flushed") == self._flushes:
                return True
            now = time.monotonic()
            if self.state.moved_bytes != moved:
                moved, since = self.state.moved_bytes, now
                ACTIVITY.progress()
            idle_seconds, most_seconds = limits()
            self._until_seconds = min(self._until_seconds, now + most_seconds)
            is_late = now - since > idle_seconds or now > self._until_seconds
            if self._ended or self.state.lost or is_late:
                return False
            if now - said > _SAY_SECONDS:
                said, why = now, f" ({self.state.problem})" if self.state.problem else ""
                say(f"uploading to {shown(self.url)}: {moved / 1e6:,.0f} MB so far{why}")
            time.sleep(_POLL_SECONDS)

    def close(self, seconds: float) -> bool:
        """Have the process end, and wait for that.

        Args:
            seconds: how long it may upload what is left.

        Returns:
            Whether the store has all that was written, and other jobs can have the run directory at once.
        """
        if self._process is None:
            return True
        self._send(OVER, seconds)
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):  # it ends by itself after some seconds more
            code = process.wait(seconds + 10.0)
        if code is None:
            kill_group(process)
        with self._reading:
            self._read(process)
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        return code == 0

    def newest(self) -> str | None:
        """Return the URL of the newest checkpoint of this job's working copy that is whole in the store."""
        names = sorted(self.state.whole, key=step_in)
        return join(self.url, FOLDER, names[-1]) if names else None

    def problem(self) -> str:
        """Return why not all that was written is in the store."""
        reason = self.state.lost or self.state.problem or self._ended or "it was not uploaded in time"
        return f"not all of the run is in {shown(self.url)}: {reason}"

    def _started(self, resume: str) -> "subprocess.Popen[bytes]":
        scratch = self.folder / SCRATCH
        scratch.mkdir(parents=True, exist_ok=True)
        options = {"url": self.url, "folder": str(self.folder), "resume": resume, **self._options}
        command = [sys.executable, "-m", _MODULE, json.dumps(options)]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(scratch / _LOG, "wb", opener=lambda path, _: os.open(path, flags, 0o666)) as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            # its group outlives Ctrl-C, and a launcher that ends its workers
            process = start_group(command, **pipes, env=side_environment())
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _send(self, kind: str, value: Any) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended
                os.write(self._process.stdin.fileno(), json.dumps([kind, value]).encode() + b"\n")

    def _read(self, process: "subprocess.Popen[bytes] | None") -> None:
        """Take in what the process has reported, and whether it has ended."""
        if process is None or process.stdout is None:
            return
        code = process.poll()
        with suppress(OSError):
            while found := os.read(process.stdout.fileno(), _READ_BYTES):
                self._text += found
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            report = json.loads(line)
            self.state = UploadState(**report.pop("state"))
            self._notes += report.pop("notes")
            self._news |= report
        if code is not None and process is self._process and not self._ended:
            self._ended_seconds = time.monotonic()
            self._ended = (
                f"the process that uploads ended with {code}; {self.folder / SCRATCH / _LOG} says why"
            )
            if "begun" in self._news and not self.state.lost:
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
    """The saver of rank 0 if the run directory is at a URL; ``stop_on_error`` is of the store, too."""

    def __init__(
        self, folder: Path, report: Report, store: RunStore, *, stop_on_error: bool = False, **options: Any
    ) -> None:
        super().__init__(folder, report, stop_on_error=stop_on_error, **options)
        self._store, self._stops, self._has_given_up = store, stop_on_error, False

    def poll(self) -> bool:
        """Report what was written or went wrong since the last call; return whether to stop for it."""
        stop = super().poll()
        if self.is_in_own_thread:
            self._note_news()
        self.replaced = self.replaced or self._store.state.lost
        fails = self._stops and self._store.state.failing_seconds > _FAILING_SECONDS
        return stop or bool(self.replaced) or fails

    def _note_news(self) -> None:
        for text in self._store.notes():
            self._report.note(text)

    def publish(self, limits: Callable[[], tuple[float, float]]) -> str:
        """Wait until what was written is whole in the store; return why it is not."""
        if not self._has_given_up and self._store.flush(limits, self._report.note):
            return ""
        self._has_given_up = True
        return self._store.problem()

    def published(self) -> tuple[str | None, str | None]:
        """Return the newest checkpoint in the store, and why the newest one here is not there."""
        self._note_news()
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
