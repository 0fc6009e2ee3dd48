"""A run as its directory shows it now: new records of its log, its progress, and whether a job trains it."""

import math
import time
from array import array
from collections import deque
from collections.abc import Mapping
from enum import Enum
from io import BytesIO
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.callbacks import EVENT, TRAIN
from hvdtrain.errors import EnvironmentFault
from hvdtrain.reporting import stored_runs as stored
from hvdtrain.reporting.compare import LogState
from hvdtrain.reporting.lock_state import LockState, look_at_lock
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.reporting.stored_runs import (
    describe_broken,
    metrics_text,
    number,
    number_text,
    parse_record,
    plain,
)
from hvdtrain.storage.files import open_regular
from hvdtrain.storage.text import counted

_COMPARED_BYTES = 256  # before the place where reading continues
_LINES = 1_000  # of the last lines, windows are kept
_LEFT_SECONDS = 30.0  # after which a summary counts, though a process keeps the lock
_RETRY_SECONDS = 60.0  # for a directory that cannot be read for the moment
_WINDOWS = 50  # of the last windows, how fast training is
_LONGEST_SECONDS = 1e11  # no training takes 3,000 years


class LogFollower:
    """Reads what comes to a log; from its start, if it has other bytes than those that were read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._restart()

    def _restart(self) -> None:
        self._offset, self._before = 0, b""
        self._lines = array("q")  # hashes of the lines that were read
        self.broken: list[int] = []  # the numbers of lines that hold no record

    def poll(self) -> tuple[list[dict[str, Any]], int | None]:
        """Read whole lines that are new; one that is not written out waits for the next time.

        Return new records, and None; if the log was cut back or replaced, all its records, and how many of
        them were there before.
        """
        lines = self._lines
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset - len(self._before))
                if is_cut := file.read(len(self._before)) != self._before:
                    file.seek(0)
                content = file.read()
        except FileNotFoundError:
            is_cut, content = bool(lines), b""
        if is_cut:
            self._restart()
        numbered = self._take(content[: content.rfind(b"\n") + 1])
        if not is_cut:
            return [record for _, record in numbered], None
        same = sum(takewhile(bool, map(int.__eq__, lines, self._lines)))
        return [record for _, record in numbered], sum(line <= same for line, _ in numbered)

    def _take(self, content: bytes) -> list[tuple[int, dict[str, Any]]]:
        """Return the records of new lines, without windows of long ago, with the lines' numbers from 1."""
        found = []
        last = len(self._lines) + content.count(b"\n")
        for line in BytesIO(content):
            self._lines.append(hash(line))
            count = len(self._lines)
            if (record := parse_record(line)) is None:
                self.broken.append(count)
            elif record.get("phase") != TRAIN or count > last - _LINES:
                found.append((count, record))
        self._offset += len(content)
        self._before = (self._before + content)[-_COMPARED_BYTES:]
        return found


class Kind(Enum):
    """Whether a run trains; that is unclear for a moment between two jobs, or worlds of one."""

    ABSENT, RUNNING, UNCLEAR, ENDED, STOPPED, KILLED = range(6)


class Standing(NamedTuple):
    """Whether a run trains, and a text that says so."""

    kind: Kind
    text: str


class StandingWatch:
    """Looks whether a run trains."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock: LockState | None = None
        self._lock_seconds = 0.0  # when the lock was first seen as it is
        self._ended_seconds: float | None = None  # when a summary was first seen with it

    def look(self, now_seconds: float, silent_seconds: float = math.inf) -> Standing:
        """Return whether the run trains now. Raises OSError if the directory cannot be read."""
        if not stored.holds_run(self._run_dir):
            self._lock = None
            return Standing(Kind.ABSENT, f"{plain(str(self._run_dir))} holds no run yet")
        lock = look_at_lock(self._run_dir)
        if lock != self._lock:
            self._lock, self._lock_seconds, self._ended_seconds = lock, now_seconds, None
        is_outdated = stored.is_outdated(self._run_dir, lock)
        summary, problem = (None, "") if is_outdated else stored.load_summary(self._run_dir)
        watched_seconds = now_seconds - self._lock_seconds
        status = stored.status_of(summary, lock, silent_seconds, watched_seconds, problem)
        holder = plain(f": process {lock.process} on {lock.host} since {lock.since}") if lock.host else ""
        if summary is not None or problem:
            self._ended_seconds = now_seconds if self._ended_seconds is None else self._ended_seconds
            if lock.is_held and now_seconds - self._ended_seconds < _LEFT_SECONDS:
                return Standing(Kind.RUNNING, f"{status}; its job is about to end{holder}")
            text = "; ".join(filter(None, [status, problem, describe_results(summary or {})]))
            return Standing(Kind.STOPPED if status == stored.STOPPED else Kind.ENDED, text)
        self._ended_seconds = None
        if status == stored.KILLED and watched_seconds >= stored.LOST_SECONDS:
            text = "no job holds the lock of the run directory, and there is no summary; the last job"
            return Standing(Kind.KILLED, f"{status}: {text}{holder or ': unknown'}")
        is_unheld = lock.is_held is False and status != stored.RUNNING
        if is_unheld and (status == stored.KILLED or lock.is_free_here):
            return Standing(Kind.UNCLEAR, f"{stored.UNKNOWN}: no job holds the lock of the run directory now")
        unseen = "" if lock.is_held else "; whether its job is alive cannot be seen here"
        return Standing(Kind.RUNNING, f"{status}{holder}{unseen}")


def describe_results(summary: Mapping[str, Any]) -> str:
    """Return what a run had done when it ended, and why it ended."""
    steps, final = summary.get("steps"), summary.get("final")
    parts = []
    if isinstance(steps, int):
        parts.append(f"{counted(steps, 'step')} in {number_text(summary.get('seconds'), ',.1f')} s")
    if isinstance(final, dict) and final:
        parts.append(metrics_text(final, ", "))
    reasons = (summary.get(name) for name in ("stopped_early", "save_error", "error"))
    return "; ".join([*parts, *(plain(str(reason).splitlines()[0]) for reason in reasons if reason)])


class RunProgress(LogState):
    """What the records of a run say, and how fast it trains; epoch and seconds are those of the last one."""

    def __init__(self) -> None:
        super().__init__({})
        self.epoch, self.seconds, self.workers = 0.0, 0.0, 0
        self.problem = ""  # what is left out of the log
        self._places: deque[tuple[float, float, float]] = deque(maxlen=_WINDOWS)  # step, epoch, seconds

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.last.get("step", 0))

    def take(self, record: Mapping[str, Any]) -> None:
        """Take a record."""
        super().take(record)
        self.epoch = _finite(record.get("epoch"), self.epoch)
        self.seconds = _finite(record.get("seconds"), self.seconds)
        workers = record.get("workers")
        self.workers = workers if isinstance(workers, int) else self.workers
        if record.get("phase") == TRAIN:
            self._places.append((self.step, self.epoch, self.seconds))
        elif record.get("phase") == EVENT:
            self._places.clear()  # other workers have another speed

    def fraction(self) -> float | None:
        """Return how much of the training is done, from 0 to 1; None if its length is not known."""
        axis, length = self._length()
        return None if length is None else min(1.0, (self.step, self.epoch)[axis] / length)

    def seconds_left(self) -> float | None:
        """Return how long the rest takes at the speed of the last windows; None if that is not known."""
        axis, length = self._length()
        first, last = self._places[0] if self._places else (0.0,) * 3, (self.step, self.epoch, self.seconds)
        if last[axis] <= first[axis]:
            first = (0.0,) * 3
        done, seconds = last[axis] - first[axis], last[2] - first[2]
        if length is None or done <= 0 or seconds <= 0:
            return None
        left = max(0.0, length - last[axis]) * seconds / done
        return left if left < _LONGEST_SECONDS else None

    def _length(self) -> tuple[int, float | None]:
        """Return whether training is counted in steps (0) or in epochs (1), and how many it has."""
        for axis, name in enumerate(("steps", "epochs")):
            length = number(self.config.get(name))
            if length is not None and math.isfinite(length):
                return axis, length if length > 0 else None
        return 0, None


def _finite(value: Any, otherwise: float) -> float:
    found = number(value)
    return found if found is not None and math.isfinite(found) else otherwise


class FollowedRun:
    """A run as its directory shows it now."""

    def __init__(self, run_dir: Path) -> None:
        self.progress = RunProgress()
        self.records: list[dict[str, Any]] = []  # what the last poll found that is new
        self.cut_step: int | None = None  # the last step that is still there, if the last poll found a cut
        self.silent_seconds = math.inf  # how long ago the last record came
        self._run_dir = run_dir
        self._log = LogFollower(run_dir / METRICS_FILE)
        self._standing = StandingWatch(run_dir)
        self._changed_seconds = -math.inf
        self._has_read = False
        self._failed_seconds: float | None = None  # since when it cannot be read

    def poll(self) -> Standing:
        """Read what is new. A directory that could be read before is tried again for a minute."""
        self.records, self.cut_step = [], None
        now_seconds = time.monotonic()
        try:
            standing = self._read(now_seconds)
        except OSError as error:
            self._failed_seconds = now_seconds if self._failed_seconds is None else self._failed_seconds
            if not self._has_read or now_seconds - self._failed_seconds >= _RETRY_SECONDS:
                remedy = stored.access_remedy(error, self._run_dir)
                raise EnvironmentFault(f"cannot read the run {self._run_dir}: {error}", remedy) from None
            return Standing(Kind.UNCLEAR, plain(f"cannot be read now, is tried again: {error}"))
        self._has_read, self._failed_seconds = True, None
        return standing

    def _read(self, now_seconds: float) -> Standing:
        # a clock of a file server may differ from this host's
        self.silent_seconds = min(
            stored.silent_seconds_of(self._run_dir), now_seconds - self._changed_seconds
        )
        # before the log: its last lines then are there
        standing = self._standing.look(now_seconds, self.silent_seconds)
        records, kept = self._log.poll()
        if self._has_read and (records or kept is not None):
            self._changed_seconds, self.silent_seconds = now_seconds, 0.0
        if kept is not None:
            self.progress = RunProgress()
            self.cut_step = records[kept - 1]["step"] if kept else 0
        self.progress.config = stored.read_run(self._run_dir).config
        for record in records:
            self.progress.take(record)
        self.records = records[kept:]
        self.progress.problem = describe_broken(self._log.broken)
        return standing
