"""A run as its directory shows it now: new records of its log, its progress, and whether a job trains it."""

import math
import time
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
_RETRY_SECONDS = 60.0  # for a directory that cannot be read for the moment
_WINDOWS = 50  # of the last windows, how fast training is
_LONGEST_SECONDS = 1e11  # no training takes 3,000 years


class LogFollower:
    """Reads what comes to a log; from its start, if it has other bytes than those that were read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = b""  # the whole lines that were read
        self._lines = 0
        self.broken: list[int] = []  # the numbers of lines that hold no record

    def poll(self) -> tuple[list[dict[str, Any]], int | None]:
        """Read whole lines that are new; one that is not written out waits for the next time.

        Return new records, and None; if the log was cut back or replaced, all its records, and how many of
        them were there before.
        """
        end = self._content[-_COMPARED_BYTES:]
        try:
            with open_regular(self._path) as file:
                file.seek(len(self._content) - len(end))
                if is_cut := file.read(len(end)) != end:
                    file.seek(0)
                content = file.read()
        except FileNotFoundError:
            is_cut, content = bool(end), b""
        content = content[: content.rfind(b"\n") + 1]
        if not is_cut:
            self._content += content
            return [record for _, record in self._take(content)], None
        lines = zip(BytesIO(self._content), BytesIO(content), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], lines))
        self._content, self._lines, self.broken = content, 0, []
        numbered = self._take(content)
        return [record for _, record in numbered], sum(line <= same for line, _ in numbered)

    def _take(self, content: bytes) -> list[tuple[int, dict[str, Any]]]:
        """Return the records of new lines, without windows of long ago, with the lines' numbers from 1."""
        found, first = [], self._lines + 1
        self._lines += content.count(b"\n")
        for count, line in enumerate(BytesIO(content), first):
            if (record := parse_record(line)) is None:
                self.broken.append(count)
            elif record.get("phase") != TRAIN or count > self._lines - _LINES:
                found.append((count, record))
        return found


class Kind(Enum):
    """Whether a run trains; that is unclear for a moment between two jobs, or worlds of one."""

    ABSENT, RUNNING, UNCLEAR, ENDED, STOPPED, KILLED = range(6)


class Standing(NamedTuple):
    """Whether a run trains, and a text that says so."""

    kind: Kind
    text: str


def standing_of(run: stored.StoredRun) -> Standing:
    """Return whether a run trains now."""
    lock = run.lock
    holder = plain(f": process {lock.process} on {lock.host} since {lock.since}") if lock.host else ""
    if not stored.holds_run(run.path):
        return Standing(Kind.ABSENT, f"{plain(str(run.path))} holds no run yet")
    if run.summary is not None or run.summary_problem:
        parts = [run.status, run.summary_problem, describe_results(run.summary or {})]
        text = "; ".join(filter(None, parts))
        return Standing(Kind.STOPPED if run.status == stored.STOPPED else Kind.ENDED, text)
    if run.status == stored.KILLED:
        text = "no job holds the lock of the run directory, and there is no summary; the last job"
        return Standing(Kind.KILLED, f"{run.status}: {text}{holder or ': unknown'}")
    if run.status == stored.UNKNOWN and lock.is_free_here:
        return Standing(Kind.UNCLEAR, f"{run.status}: no job holds the lock of the run directory now")
    unseen = "" if lock.is_held else "; whether its job is alive cannot be seen here"
    return Standing(Kind.RUNNING, f"{stored.RUNNING}{holder}{unseen}")


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
        self._read_seconds: float | None = None  # when it was read last

    def poll(self) -> Standing:
        """Read what is new. A directory that could be read before is tried again for a minute."""
        self.records, self.cut_step = [], None
        now_seconds = time.monotonic()
        try:
            standing = self._read()
        except OSError as error:
            if self._read_seconds is None or now_seconds - self._read_seconds >= _RETRY_SECONDS:
                remedy = stored.access_remedy(error, self._run_dir)
                raise EnvironmentFault(f"cannot read the run {self._run_dir}: {error}", remedy) from None
            return Standing(Kind.UNCLEAR, plain(f"cannot be read now, is tried again: {error}"))
        self._read_seconds = now_seconds
        return standing

    def _read(self) -> Standing:
        run = stored.read_run(self._run_dir)  # before the log: its last lines then are there
        standing, self.silent_seconds = standing_of(run), run.silent_seconds
        records, kept = self._log.poll()
        if kept is not None:
            self.progress = RunProgress()
            self.cut_step = records[kept - 1]["step"] if kept else 0
        self.progress.config = run.config
        for record in records:
            self.progress.take(record)
        self.records = records[kept:]
        self.progress.problem = describe_broken(self._log.broken)
        return standing
