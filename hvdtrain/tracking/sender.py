"""Sending what a run has written to one tracker, as far as it has not been sent."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints import storage, verification
from hvdtrain.checkpoints.linked_copy import copied, remove_copies
from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.errors import EnvironmentFault
from hvdtrain.regular_files import read_regular
from hvdtrain.reporting.lock_state import LockState
from hvdtrain.reporting.log_records import BrokenLines
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE
from hvdtrain.reporting.run_status import KILLED, UNKNOWN, status_of
from hvdtrain.reporting.stored_runs import load_summary
from hvdtrain.tracking.folder import FOLDER, read_starts, tracking_folder
from hvdtrain.tracking.rows import Clock, Row, row_of
from hvdtrain.tracking.sent_lines import SentLines
from hvdtrain.tracking.state import SenderState
from hvdtrain.tracking.tracker import TrackedRun, Tracker

CHECKPOINTS = "checkpoints"
_LINES = 150  # in one request
_MAX_BYTES = 1 << 24


class Sender:
    """Sends a run to a tracker, from where the last sender of this run directory stood.

    Args:
        run: the run.
        name: the tracker's name.
        new_tracker: loads the tracker's library.
        with_checkpoints: whether to send checkpoints, too.

    Attributes:
        state: where it stands.

    Raises:
        OSError: If the run directory can be neither read nor written.
    """

    def __init__(
        self, run: TrackedRun, name: str, new_tracker: Callable[[], Tracker], with_checkpoints: bool = False
    ) -> None:
        self._run, self._new_tracker, self._with_checkpoints = run, new_tracker, with_checkpoints
        folder = tracking_folder(run.folder)
        self._path = folder / f"{name}.json"
        self.state = SenderState.read(self._path)
        self._lines = SentLines(run.folder / METRICS_FILE, folder / f"{name}.sent")
        self._tracker: Tracker | None = None
        self._is_open = self._has_end = False
        self._bad: set[str] = set()  # names of checkpoints
        self._broken = BrokenLines()  # that were not told
        remove_copies(folder, name)

    def round(self) -> None:
        """Send all that there is to send now.

        Raises:
            Exception: Whatever the tracker's library raises; what was sent until then is noted.
        """
        if not self._is_up_to_date(self.state.status):
            self._send_checkpoint(self._send_lines())

    def end(self, status: str) -> None:
        """Send what is left, how the run ended, and the last checkpoint; the next round opens the run again.

        Raises:
            Exception: Whatever the tracker's library raises. If the tracker has the end, the next call sends
                only the checkpoint.
        """
        if self._is_up_to_date(status):
            return
        if not self._has_end:
            tracker = self._send_lines()
            if tracker.ends_last:
                self._send_checkpoint(tracker)
            summary = read_summary(self._run.folder)
            tracker.end(status, summary if status not in (KILLED, UNKNOWN) else {})
            self._is_open, self._has_end = False, True
            self.state.status = status
            self.state.write(self._path)
        if self._tracker is not None and not self._tracker.ends_last:
            self._send_checkpoint(self._tracker)

    def _is_up_to_date(self, status: str) -> bool:
        """Return whether there is nothing to send, and the tracker need not be asked.

        Args:
            status: how the run ended or stands.
        """
        if self._is_open or self._has_end or not self.state.run or self._lines.unsent(1):
            return False
        is_known = self.state.status == status and len(read_starts(self._run.folder)) <= self.state.starts
        newest = self._newest_checkpoint()
        if not is_known or (newest is not None and newest.name not in self.state.checkpoints):
            return False
        self._tracker = self._tracker or self._new_tracker()
        return self._tracker.is_up_to_date(self.state)

    def _newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint, if checkpoints are asked for and there is one."""
        paths = storage.checkpoints_in(self._run.folder / CHECKPOINTS) if self._with_checkpoints else []
        return paths[-1] if paths else None

    def _send_lines(self) -> Tracker:
        """Send what there is but for checkpoints; return the tracker."""
        tracker = self._opened()
        self._send_starts(tracker)
        while lines := self._lines.unsent(_LINES):
            clock = Clock(read_starts(self._run.folder), self._run.began_seconds)
            found = [row_of(line, clock) for line in lines]
            rows = [row for row in found if row is not None]
            steps = [row.step for row in rows if row.is_window]
            if rows:
                self._note_attempt(lines, steps)
                tracker.send(rows)
            self._note_steps(tracker, steps)
            self._note_broken(found)
            self._lines.mark_sent(lines)
            self.state.write(self._path)
        return tracker

    def notes(self) -> list[str]:
        """Return what the user should know and has not been told."""
        if self._tracker is None:
            return []
        found, self._tracker.notes = self._tracker.notes, []
        broken, self._broken = self._broken.describe(), BrokenLines()
        return [*found, broken] if broken else found

    def _note_broken(self, rows: Sequence[Row | None]) -> None:
        """Note which of the next lines of the log hold no record."""
        for number, row in enumerate(rows, self._lines.count + 1):
            if row is None:
                self._broken = self._broken.with_line(number)

    def _opened(self) -> Tracker:
        """Return the tracker with the run open."""
        if self._tracker is None:
            self._tracker = self._new_tracker()
        if not self._is_open:
            found = deepcopy(self.state)  # if this fails, the next attempt begins with what was known before
            if not self._tracker.open(self._run, found):
                self._lines.forget()
                found.starts, found.checkpoints, found.tried_step = 0, [], -1
            found.status = ""  # it is shown as running now
            self.state, self._is_open, self._has_end = found, True, False
            self.state.write(self._path)
        return self._tracker

    def _send_starts(self, tracker: Tracker) -> None:
        for number, start in enumerate(read_starts(self._run.folder)):
            if number >= self.state.starts:
                tracker.start(start, number)
                self.state.starts = number + 1
                self.state.write(self._path)

    def _note_attempt(self, lines: Sequence[bytes], steps: Sequence[int]) -> None:
        """Note what is about to be sent: if this process is killed meanwhile, the tracker may have it."""
        state = self.state
        if state.tried_step > state.last_step and state.tried != _digest(lines[: state.tried_lines]):
            state.last_step = state.tried_step  # the log was cut back after it
        state.tried_step = max(steps, default=-1)
        state.tried, state.tried_lines = _digest(lines), len(lines)
        state.write(self._path)

    def _note_steps(self, tracker: Tracker, steps: Sequence[int]) -> None:
        """Note which steps were sent; tell the tracker if it has had some of them before."""
        last = self.state.last_step
        if steps and steps[0] <= last:
            tracker.repeat(steps[0], last)
            last = -1
        self.state.last_step = max([last, *steps])

    def _send_checkpoint(self, tracker: Tracker) -> None:
        """Send the newest checkpoint, if that is asked, it was not sent, and every byte of it is good."""
        newest = self._newest_checkpoint()
        if newest is None or (name := newest.name) in self.state.checkpoints or name in self._bad:
            return
        with copied(newest, self._path.parent, self._path.stem) as folder:
            if folder is None:
                return
            if not _is_good(folder):
                self._bad.add(name)
                return
            tracker.checkpoint(folder)
        self.state.checkpoints.append(name)
        self.state.write(self._path)


def _digest(lines: Sequence[bytes]) -> str:
    return hashlib.blake2b(b"".join(lines), digest_size=16).hexdigest()


def _is_good(checkpoint: Path) -> bool:
    try:
        verification.verify(checkpoint)
    except (CorruptCheckpoint, EnvironmentFault):
        return False
    return True


def read_summary(run_dir: Path) -> Mapping[str, Any]:
    """Return what summary.json says; nothing if it cannot be read."""
    try:
        found = json.loads(read_regular(run_dir / SUMMARY_FILE, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def lines_to_send(run_dir: Path, name: str) -> int:
    """Return how many lines of a run's log a tracker does not have.

    Raises:
        OSError: If the log cannot be read.
    """
    return SentLines(run_dir / METRICS_FILE, run_dir / FOLDER / f"{name}.sent").remaining()


def status_when_over(run_dir: Path) -> str:
    """Return the word for how a run ended whose job is known to be over."""
    try:
        summary, problem = load_summary(run_dir)
    except OSError:
        return UNKNOWN
    return status_of(summary, LockState(is_held=False), problem=problem)


def began_seconds(run_dir: Path) -> float:
    """Return when a run began that does not say it: when its config was written, or else now."""
    try:
        return (run_dir / "config.yaml").stat().st_mtime
    except OSError:
        return time.time()
