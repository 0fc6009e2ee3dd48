"""The command ``watch``: evaluations, events and progress of a run, as its directory shows them."""

import math
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from hvdtrain.callbacks import EVAL, EVENT, TRAIN
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.reporting import stored_runs as stored
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.reporting.stored_runs import (
    FILES,
    LOST_SECONDS,
    describe_broken,
    describe_event,
    metrics_in,
    metrics_text,
    number,
    number_text,
    parse_record,
    plain,
)
from hvdtrain.storage.files import open_regular
from hvdtrain.storage.text import counted

_POLL_SECONDS = 1.0
_COMPARED_BYTES = 256  # before the place where reading continues
_RETRY_SECONDS = 60.0  # for a directory that cannot be read for the moment
_WAIT_SECONDS = 60.0  # for a run that stopped or was killed while it was followed
_LINE_SECONDS = 5.0  # between lines of progress
_SILENT_SECONDS = 60.0  # without a record, after which a line says so; likewise between them
_EVALUATIONS = 100  # that are shown of those before
_WINDOWS = 50  # of the last windows, how fast training is
_LONGEST_SECONDS = 1e11  # no training takes 3,000 years
# of a window, with their labels and formats
_MEASURES = (
    ("learning_rate", "lr", ".3g"), ("samples_per_second", "samples/s", ",.0f"),
    ("data_wait_fraction", "data wait", ".0%"), ("slowest_rank", "slowest rank", ".0f"),
    ("wait_fraction", "waiting for it", ".0%"), ("peak_memory_mib", "peak MiB", ",.0f"),
)  # fmt: skip


class LogFollower:
    """Reads what comes to a log; from its start, if it has other bytes than those that were read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._lines, self._end = 0, 0, b""  # of the whole lines that were read
        self.broken: list[int] = []  # the numbers of lines that hold no record

    def poll(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the records of new whole lines; all records and True if the log was cut back or replaced."""
        is_cut, content = bool(self._end), b""
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset - len(self._end))
                if is_cut := file.read(len(self._end)) != self._end:
                    file.seek(0)
                content = file.read()
        except FileNotFoundError:
            pass
        if is_cut:
            self._offset, self._lines, self._end, self.broken = 0, 0, b"", []
        content = content[: content.rfind(b"\n") + 1]
        self._offset += len(content)
        self._end = (self._end + content)[-_COMPARED_BYTES:]
        found = []
        for line in BytesIO(content):
            self._lines += 1
            if (record := parse_record(line)) is None:
                self.broken.append(self._lines)
            else:
                found.append(record)
        return found, is_cut


class Kind(Enum):
    """Whether a run trains; that is unclear for a moment between two jobs, or worlds of one."""

    ABSENT, RUNNING, UNCLEAR, ENDED, STOPPED, KILLED = range(6)


class Standing(NamedTuple):
    """Whether a run trains, and a text that says so."""

    kind: Kind
    text: str


def standing_of(run: stored.StoredRun) -> Standing:
    """Return whether a run trains now."""
    lock, holder = run.lock, plain(run.lock.describe())
    if not stored.holds_run(run.path):
        return Standing(Kind.ABSENT, f"{plain(str(run.path))} holds no run yet")
    if run.summary is not None or run.summary_problem:
        summary: Mapping[str, Any] = run.summary or {}
        steps, final = summary.get("steps"), summary.get("final")
        parts = [run.status, run.summary_problem]
        if isinstance(steps, int):
            parts.append(f"{counted(steps, 'step')} in {number_text(summary.get('seconds'), ',.1f')} s")
        if isinstance(final, dict):
            parts.append(metrics_text(final, ", "))
        reasons = (summary.get(name) for name in ("stopped_early", "save_error", "error"))
        parts += [plain(str(reason).splitlines()[0]) for reason in reasons if reason]
        text = "; ".join(filter(None, parts))
        return Standing(Kind.STOPPED if run.status == stored.STOPPED else Kind.ENDED, text)
    if run.status == stored.KILLED:
        text = "no job holds the lock of the run directory, and there is no summary; the last job"
        return Standing(Kind.KILLED, f"{run.status}: {text}{holder or ': unknown'}")
    if run.status == stored.UNKNOWN and lock.is_free_here:
        return Standing(Kind.UNCLEAR, f"{run.status}: no job holds the lock of the run directory now")
    unseen = "" if lock.is_held else "; whether its job is alive cannot be seen here"
    return Standing(Kind.RUNNING, f"{stored.RUNNING}{holder}{unseen}")


class FollowedRun:
    """A run as its directory shows it now."""

    def __init__(self, run_dir: Path) -> None:
        self.config: Mapping[str, Any] = {}
        self.records: list[dict[str, Any]] = []  # what the last poll found that is new
        self.window: Mapping[str, Any] = {}  # the last record of a window
        self.workers = 0
        self.is_cut = False  # whether the last poll found that the log was cut back
        self.silent_seconds = math.inf  # how long ago the last record came
        self._run_dir, self._log = run_dir, LogFollower(run_dir / METRICS_FILE)
        self._windows: deque[Mapping[str, Any]] = deque(maxlen=_WINDOWS)
        self._read_seconds: float | None = None  # when it was read last

    @property
    def problem(self) -> str:
        """What is left out of the log, as text."""
        return describe_broken(self._log.broken)

    def poll(self) -> Standing:
        """Read what is new. A directory that could be read before is tried again for a minute."""
        self.records, self.is_cut, now_seconds = [], False, time.monotonic()
        try:
            run = stored.read_run(self._run_dir)  # before the log: its last lines then are there
            standing, self.silent_seconds, self.config = standing_of(run), run.silent_seconds, run.config
            self.records, self.is_cut = self._log.poll()
        except OSError as error:
            if self._read_seconds is None or now_seconds - self._read_seconds >= _RETRY_SECONDS:
                remedy = stored.access_remedy(error, self._run_dir)
                raise EnvironmentFault(f"cannot read the run {self._run_dir}: {error}", remedy) from None
            return Standing(Kind.UNCLEAR, plain(f"cannot be read now, is tried again: {error}"))
        self._read_seconds = now_seconds
        for record in self.records:
            workers = record.get("workers")
            self.workers = workers if isinstance(workers, int) else self.workers
            if record.get("phase") == TRAIN:
                self.window = record
                self._windows.append(record)
            elif record.get("phase") == EVENT:
                self._windows.clear()  # other workers have another speed
        return standing

    def seconds_left(self) -> float | None:
        """Return how long the rest takes at the speed of the last windows; None if that is not known."""
        axis = "step" if self.config.get("steps") is not None else "epoch"
        length, last = number(self.config.get(f"{axis}s")), self.window
        first = self._windows[0] if len(self._windows) > 1 else {axis: 0.0, "seconds": 0.0}
        values = [number(one.get(name)) for name in (axis, "seconds") for one in (first, last)]
        if length is None or any(value is None for value in values):
            return None
        begun, done, since, until = (value or 0.0 for value in values)
        left = (length - done) * (until - since) / (done - begun) if done > begun else math.nan
        return max(0.0, left) if until > since and left < _LONGEST_SECONDS else None


def follow(run_dir: Path, wait: float | None = None) -> None:
    """Show a run until it ends."""
    followed, ends, view = FollowedRun(run_dir), Ends(wait), View(run_dir)
    standing = followed.poll()
    while standing.kind is not Kind.ABSENT or wait is not None:
        view.show(followed, standing)
        if ends.is_over(standing, time.monotonic()):
            break
        time.sleep(_POLL_SECONDS)
        standing = followed.poll()
    if standing.kind is Kind.ABSENT:
        raise UsageError(
            f"{run_dir}: no run (none of {', '.join(FILES)})",
            "Name a run directory. With --wait SECONDS, watch waits for the run to begin.",
        )


class Ends:
    """When following ends, with ``wait`` as of ``follow``."""

    def __init__(self, wait: float | None) -> None:
        self._wait = wait
        self._has_trained = False
        self._since: float | None = None

    def is_over(self, standing: Standing, now_seconds: float) -> bool:
        """Return whether the run has ended, or has not trained for as long as it is waited for."""
        if standing.kind is Kind.UNCLEAR:
            return False
        if standing.kind is Kind.RUNNING:
            self._has_trained, self._since = True, None
            return False
        if standing.kind is Kind.ENDED:
            return True
        self._since = now_seconds if self._since is None else self._since
        # between two generations of an elastic job nobody holds the lock
        otherwise = LOST_SECONDS if standing.kind is Kind.KILLED else 0.0
        otherwise = _WAIT_SECONDS if self._has_trained else otherwise
        return now_seconds - self._since >= (otherwise if self._wait is None else self._wait)


class View:
    """Lines: evaluations, events and progress."""

    def __init__(self, run_dir: Path, console: Console | None = None) -> None:
        self._console = console or Console()
        self._name = plain(run_dir.resolve().name)
        self._said: dict[str, str] = {}
        self._line_seconds = self._silent_seconds = -math.inf
        self._has_window = False

    def show(self, run: FollowedRun, standing: Standing) -> None:
        """Show what is new."""
        if run.is_cut:
            self._say("the log was cut back, as the run was resumed or begun again; what it holds now:")
        if standing.kind is not Kind.ENDED:
            self._say_changes(standing=standing.text)
        facts = [plain(str(run.config[name])) for name in ("task", "framework") if name in run.config]
        facts += [counted(run.workers, "worker")] if run.workers else []
        self._say_changes(facts=", ".join(facts), problem=run.problem)
        left_out = sum(record.get("phase") == EVAL for record in run.records) - _EVALUATIONS
        if left_out > 0:
            self._say(f"{counted(left_out, 'earlier evaluation')} left out")
        for record in run.records:
            phase, step = record.get("phase"), f"step {record['step']:>6,}"
            self._has_window = self._has_window or phase == TRAIN
            left_out -= phase == EVAL
            if phase == EVENT:
                self._say(f"event {step}  {describe_event(record)}")
            elif phase == EVAL and left_out < 0:
                self._say(f"eval  {step}  {metrics_text(metrics_in(record))}")
        self._show_progress(run, standing)
        if standing.kind is Kind.ENDED:  # the last line says how
            self._say_changes(standing=standing.text)

    def _say_changes(self, **texts: str) -> None:
        for kind, text in texts.items():
            if text and self._said.get(kind) != text:
                self._say(f"{self._name}: {text}")
            self._said[kind] = text

    def _show_progress(self, run: FollowedRun, standing: Standing) -> None:
        now, is_training = time.monotonic(), standing.kind in (Kind.RUNNING, Kind.UNCLEAR)
        if self._has_window and (now - self._line_seconds >= _LINE_SECONDS or not is_training):
            self._has_window, self._line_seconds, window = False, now, run.window
            seconds = run.seconds_left() if standing.kind is Kind.RUNNING else None
            shown = [one for one in _MEASURES if one[0] in window]
            parts = [
                f"train step {window['step']:>6,}",
                f"epoch {number_text(window.get('epoch'), '6.2f')}",
                metrics_text(metrics_in(window)),
                *(f"{label} {number_text(window[name], form)}" for name, label, form in shown),
                "" if seconds is None else f"{timedelta(seconds=round(seconds))} left",
            ]
            self._say("  ".join(filter(None, parts)))
        is_silent = standing.kind is Kind.RUNNING and _SILENT_SECONDS <= run.silent_seconds < math.inf
        if is_silent and now - self._silent_seconds >= _SILENT_SECONDS:
            self._silent_seconds = now
            self._say(f"{self._name}: last record {timedelta(seconds=round(run.silent_seconds))} ago")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
