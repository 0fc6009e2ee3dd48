"""Following a run from another terminal or host, by reading its directory."""

import math
import os
import time
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.checkpoints.remote.fetched import reading
from hvdtrain.checkpoints.remote.fetched_runs import FetchedRun
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.reporting.log_records import MAX_LINE, BrokenLines, is_window, parse_record
from hvdtrain.reporting.records import EVAL, EVENT
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.reporting.stored_runs import CONFIG_FILE, FILES, access_remedy, plain, read_run
from hvdtrain.storage.files import open_regular
from hvdtrain.tools.report.follow_view import RunProgress, View, open_view
from hvdtrain.tools.report.standing import Kind, Standing, StandingWatch

_WHOLE_BYTES = 1_000_000  # at the end of a log; before them, only evaluations and events are read
_COMPARED_BYTES = 256  # before the place where reading goes on
_BLOCK_BYTES = 1 << 22
_KEPT = tuple(f'"{phase}"'.encode() for phase in (EVAL, EVENT))


class News(NamedTuple):
    """What came since a log was last read.

    Attributes:
        records: new records, in order; all of them if it was cut.
        is_cut: whether what was read before is no longer there, or is now another file's.
        kept: how many of the records are the same as before the cut.
    """

    records: list[dict[str, Any]]
    is_cut: bool
    kept: int = 0


class LogFollower:
    """Reads what comes to a log.

    A log that is replaced, or shorter, or has other bytes than those that were read, is read from its start.

    Args:
        path: the log; there may be none yet.

    Attributes:
        broken: the lines that hold no record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._before = b""
        self._lines = array("q")  # hashes of the lines that were read
        self._is_in_long_line = False  # whose first bytes were left out
        self.broken = BrokenLines()

    def poll(self) -> News:
        """Read whole lines that are new; one that is not written out waits for the next time.

        Raises:
            OSError: If the log cannot be read.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            was_there = self._identity is not None
            self._restart(None)
            return News([], was_there)
        before = self._identity, self._offset, self._before, self._lines, self._is_in_long_line
        broken = self.broken
        count = len(self._lines)
        with file:
            try:
                return self._news(file.fileno())
            except OSError:  # what was read is not told: it is read again
                self._identity, self._offset, self._before, self._lines, self._is_in_long_line = before
                self.broken = broken
                del self._lines[count:]
                raise

    def _news(self, file: int) -> News:
        status = os.fstat(file)
        identity = status.st_dev, status.st_ino
        is_cut = self._identity is not None and not self._continues(file, identity, status)
        lines_before = self._lines
        if is_cut or self._identity is None:
            self._restart(identity)
        found = self._read(file, status.st_size)
        kept = self._same_lines(lines_before) if is_cut else 0
        return News([record for _, record in found], is_cut, sum(line < kept for line, _ in found))

    def _continues(self, file: int, identity: tuple[int, int], status: os.stat_result) -> bool:
        if identity != self._identity or status.st_size < self._offset:
            return False
        return os.pread(file, len(self._before), self._offset - len(self._before)) == self._before

    def _restart(self, identity: tuple[int, int] | None) -> None:
        self._identity, self._offset, self._before = identity, 0, b""
        self._lines, self._is_in_long_line, self.broken = array("q"), False, BrokenLines()

    def _same_lines(self, before: "array[int]") -> int:
        """Return how many lines at the start of the log are those of an earlier reading."""
        pairs = enumerate(zip(before, self._lines, strict=False))
        differing = next((index for index, (one, other) in pairs if one != other), None)
        return min(len(before), len(self._lines)) if differing is None else differing

    def _read(self, file: int, size: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the records of new lines, with the lines' numbers."""
        records: list[tuple[int, dict[str, Any]]] = []
        rest = b""
        place = start = self._offset
        while block := os.pread(file, _BLOCK_BYTES, place):
            place += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if (record := self._take(line, size)) is not None:
                    records.append((len(self._lines) - 1, record))
            if len(rest) > MAX_LINE:
                self._offset += len(rest)
                self._is_in_long_line, rest = True, b""
        if self._offset > start:
            length = min(_COMPARED_BYTES, self._offset)
            self._before = os.pread(file, length, self._offset - length)
        return records

    def _take(self, line: bytes, size: int) -> dict[str, Any] | None:
        """Go past a line; return its record, or None if it has none, or one that is left out."""
        self._offset += len(line) + 1
        self._lines.append(hash(line))
        is_rest, self._is_in_long_line = self._is_in_long_line, False
        is_early = self._offset < size - _WHOLE_BYTES
        if is_early and not is_rest and is_window(line):
            return None
        record = None if is_rest or len(line) > MAX_LINE else parse_record(line)
        if record is None:
            self.broken = self.broken.with_line(len(self._lines))
        is_left_out = is_early and not any(word in line for word in _KEPT)
        return None if is_left_out else record


_POLL_SECONDS = 1.0
_POLL_URL_SECONDS = 10.0  # each look is a request
_RETRY_SECONDS = 60.0  # for a directory that cannot be read for the moment
_WAIT_SECONDS = 60.0  # for a run that stopped or was lost while it was followed


def follow(place: Path | str, wait: float | None = None) -> None:
    """Show how a run goes on until it ends.

    Args:
        place: its directory or its URL.
        wait: seconds to wait for a run that is not there, or that stopped or was lost, to train; if None, a
            minute for one that stopped while it was followed, and not at all for the others.

    Raises:
        UsageError: If there is no run.
        EnvironmentFault: If its directory cannot be read.
    """
    fetched = None
    if isinstance(place, str):
        with reading(place):
            fetched = FetchedRun(place)
    run_dir = Path(place) if fetched is None else fetched.path
    followed = FollowedRun(run_dir, fetched)
    poll_seconds = _POLL_SECONDS if fetched is None else _POLL_URL_SECONDS
    ends = Ends(wait)
    standing = followed.poll()
    if standing.kind is Kind.ABSENT and wait is None:
        raise UsageError(
            f"{place}: no run (none of {', '.join(FILES)})",
            "Name a run directory. With --wait SECONDS, watch waits for the run to begin.",
        )
    with open_view(run_dir) as view:
        while True:
            _show(view, followed, standing)
            if ends.is_over(standing, time.monotonic()):
                break
            time.sleep(poll_seconds)
            standing = followed.poll()
        view.end(standing)


def _show(view: View, followed: "FollowedRun", standing: Standing) -> None:
    if followed.kept is not None:
        view.cut(followed.kept)
    view.show(followed.progress, standing, followed.silent_seconds())


class FollowedRun:
    """A run as its directory shows it now.

    Args:
        run_dir: its directory.
        fetched: the copy that the directory is of one at a URL; None if it is none.

    Attributes:
        progress: what its records say.
        kept: what those said that are still there, if the last poll found that others are gone: the run
            resumed from an earlier step.
    """

    def __init__(self, run_dir: Path, fetched: FetchedRun | None = None) -> None:
        self._fetched = fetched
        self.progress = RunProgress()
        self.kept: RunProgress | None = None
        self._run_dir = run_dir
        self._log = LogFollower(run_dir / METRICS_FILE)
        self._standing = StandingWatch(run_dir)
        self._config_state: tuple[int, int] | None = None
        self._changed_seconds = math.nan
        self._has_read = False
        self._failed_seconds: float | None = None  # since when it cannot be read

    def poll(self) -> Standing:
        """Read what is new.

        A directory that could be read before is tried again for a minute: a file server may be away.

        Raises:
            EnvironmentFault: If the directory cannot be read.
        """
        self.kept = None
        now_seconds = time.monotonic()
        try:
            standing = self._read(now_seconds)
        except OSError as error:
            self._failed_seconds = now_seconds if self._failed_seconds is None else self._failed_seconds
            if not self._has_read or now_seconds - self._failed_seconds >= _RETRY_SECONDS:
                remedy = access_remedy(error, self._run_dir)
                raise EnvironmentFault(f"cannot read the run {self._run_dir}: {error}", remedy) from None
            return Standing(Kind.UNCLEAR, plain(f"cannot be read now, is tried again: {error}"))
        self._has_read, self._failed_seconds = True, None
        return standing

    def _read(self, now_seconds: float) -> Standing:
        if self._fetched is not None:
            self._fetched.refresh()
        silent_seconds = self.silent_seconds()
        # before the log: its last lines then are there
        standing = self._standing.look(now_seconds, math.inf if silent_seconds is None else silent_seconds)
        self._read_config()
        age_seconds = self._age_seconds()
        news = self._log.poll()
        if news.is_cut:
            self.progress, self.kept = (RunProgress(self.progress.config) for _ in range(2))
            for record in news.records[: news.kept]:
                self.kept.take(record)
        for record in news.records:
            self.progress.take(record)
        self.progress.problem = self._log.broken.describe()
        if news.records or news.is_cut:
            self._changed_seconds = now_seconds - (age_seconds if math.isnan(self._changed_seconds) else 0.0)
        return standing

    def silent_seconds(self) -> float | None:
        """Return how long ago the last record came; None if none has come."""
        silent = time.monotonic() - self._changed_seconds
        return None if math.isnan(silent) else silent

    def _age_seconds(self) -> float:
        """Return how old the log is by the clock of its file system, which may be another host's."""
        try:
            return max(0.0, time.time() - os.stat(self._run_dir / METRICS_FILE).st_mtime)
        except FileNotFoundError:  # removed just now
            return 0.0

    def _read_config(self) -> None:
        try:
            status = os.stat(self._run_dir / CONFIG_FILE)
        except FileNotFoundError:
            return
        state = status.st_mtime_ns, status.st_ino
        if state != self._config_state:
            self._config_state = state
            self.progress.config = read_run(self._run_dir).config


class Ends:
    """When following ends.

    Args:
        wait: as of ``follow``.
    """

    def __init__(self, wait: float | None) -> None:
        self._wait = wait
        self._has_trained = False
        self._since: float | None = None

    def is_over(self, standing: Standing, now_seconds: float) -> bool:
        """Return whether the run has ended, or has stood still for as long as it is waited for."""
        if standing.kind is Kind.UNCLEAR:
            return False
        if standing.kind is Kind.RUNNING:
            self._has_trained, self._since = True, None
            return False
        if standing.kind is Kind.ENDED:
            return True
        self._since = now_seconds if self._since is None else self._since
        otherwise = _WAIT_SECONDS if self._has_trained else 0.0
        return now_seconds - self._since >= (otherwise if self._wait is None else self._wait)
