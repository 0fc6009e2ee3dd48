"""Runs as their directories hold them: found, named and read. Nothing is written there."""

import errno
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.config.yaml_reader import parse_yaml
from hvdtrain.errors import ConfigError, EnvironmentFault, UsageError
from hvdtrain.reporting.jsonl import flattened, lines_of
from hvdtrain.reporting.lock_state import Holder, look_at_lock
from hvdtrain.reporting.records import WorkersChange
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE
from hvdtrain.storage.files import parse_line, read_regular
from hvdtrain.storage.text import counted, printable

RUNNING, COMPLETED, UNSAVED, STOPPED = "running", "completed", "unsaved", "stopped"
FAILED, KILLED, UNKNOWN = "failed", "killed", "unknown"
LOST_SECONDS = 10.0  # between two worlds of an elastic job, nobody holds the lock for a moment
_NO_ACCESS = (errno.EACCES, errno.EPERM)
_FAR_SECONDS = 600.0  # without a record, after which a job that cannot be seen here is taken for ended


def ending_of(summary: Mapping[str, Any]) -> str:
    """Return the word for how a summary says that a run ended."""
    status = summary.get("status")
    return status if status in (COMPLETED, UNSAVED, STOPPED, FAILED) else UNKNOWN


def access_remedy(error: OSError, folder: Path, writes: bool = False) -> str:
    """Return what to do about an error of access to a run directory; nothing about other errors."""
    if error.errno not in _NO_ACCESS:
        return ""
    return f"Its owner can give access: chmod -R a+{'rwX' if writes else 'rX'} {folder}."


CONFIG_FILE = "config.yaml"
FILES = (SUMMARY_FILE, CONFIG_FILE, METRICS_FILE)
_MAX_BYTES = 10_000_000  # of summary.json and config.yaml
_MAX_SHOWN = 1000  # characters of a value
_MAX_HEADER = 40  # lines
_MAX_COUNT = 1 << 53  # beyond it, floats are not exact


@dataclass(frozen=True)
class StoredRun:
    """What the small files of a run directory hold."""

    path: Path  # the directory
    # fields of the config; empty if it cannot be read
    config: Mapping[str, Any] = field(default_factory=dict)
    header: Sequence[str] = ()  # lines of comment at the top of config.yaml
    summary: Mapping[str, Any] | None = None  # how the run ended; None if it did not say so, or was resumed
    config_problem: str = ""  # why the config cannot be read, if it is there
    summary_problem: str = ""  # likewise
    lock: Holder = field(default_factory=Holder)  # who uses the directory
    silent_seconds: float = math.inf  # how long ago the last record came
    status: str = UNKNOWN  # how the run ended or stands, one of the words above

    @property
    def may_train(self) -> bool:
        """Whether a job may train it now, as far as that can be seen here."""
        is_unseen = self.status == UNKNOWN and self.summary is None
        return self.status == RUNNING or (is_unseen and self.silent_seconds < _FAR_SECONDS)


def find_runs(paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Return the runs among directories, and what to say of those that are left out."""
    runs, unreadable, others = list[Path](), list[str](), list[Path]()

    def look(path: Path, *, inside: bool) -> list[Path]:
        try:
            if not path.is_dir() or holds_run(path):
                return [path] if path.is_dir() else []
            folders = sorted(path.iterdir()) if inside else []
        except OSError as error:
            text = f"{path}: left out, it cannot be read: {error.strerror or error}"
            unreadable.append(plain(f"{text}. {access_remedy(error, path)}".rstrip()))
            return []
        return [run for folder in folders for run in look(folder, inside=False)]

    for path in paths:
        known, found = len(unreadable), look(path, inside=True)
        runs += found
        others += [path] if not found and len(unreadable) == known else []
    if not runs and unreadable and not others:
        raise EnvironmentFault("; ".join(unreadable))
    if not runs:
        problems = [*unreadable, *(plain(f"{path}: no run (none of {', '.join(FILES)})") for path in others)]
        raise UsageError("; ".join(problems), "Name run directories, or a folder of run directories.")
    notes = [*unreadable, *(plain(f"{path}: left out, it holds no run") for path in others)]
    return list(dict.fromkeys(runs)), list(dict.fromkeys(notes))


def holds_run(path: Path) -> bool:
    """Return whether a directory is that of a run. Raises PermissionError if its files cannot be read."""
    found = [file for name in FILES if (file := path / name).exists()]
    for file in found:
        if not os.access(file, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
    return bool(found)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: the last part of its path, or all of it if two have the same."""
    short = [plain(path.resolve().name) for path in paths]
    return [
        name if short.count(name) == 1 else plain(str(path)) for name, path in zip(short, paths, strict=True)
    ]


def read_run(path: Path) -> StoredRun:
    """Read the small files of a run, and look how it stands.

    Not to be called in a process that holds the lock of the run directory, which it would release.
    """
    lock = look_at_lock(path)  # before the summary: a job writes that before it lets go of the lock
    silent_seconds = math.inf
    with suppress(OSError):
        silent_seconds = max(0.0, time.time() - os.stat(path / METRICS_FILE).st_mtime)
    config, header, config_problem = read_config(path)
    summary, problem = _read_summary(path, lock)
    status = UNKNOWN
    if summary is not None:
        status = ending_of(summary)
    elif lock.is_held:
        status = RUNNING
    elif lock.is_free_here and silent_seconds >= LOST_SECONDS and not problem:
        status = KILLED
    return StoredRun(path, config, header, summary, config_problem, problem, lock, silent_seconds, status)


def _read_summary(path: Path, lock: Holder) -> tuple[dict[str, Any] | None, str]:
    """Return the summary of a run, if there is one, and why it cannot be read."""
    file = path / SUMMARY_FILE
    try:
        if not lock.is_free_here and os.stat(file).st_mtime_ns < lock.changed_ns:
            return None, ""  # a job that resumes a run removes the one before when it has set up the rest
        summary = json.loads(read_regular(file, _MAX_BYTES))
        if not isinstance(summary, dict) or not isinstance(summary.get("final"), dict):
            raise ValueError("it is not the summary of a run")
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"cannot read {SUMMARY_FILE}: {error}"
    return summary, ""


def read_config(run_dir: Path) -> tuple[dict[str, Any], list[str], str]:
    """Return a run's config, the comment above it, and why it could not be read, if it is there."""
    try:
        text = read_regular(run_dir / CONFIG_FILE, _MAX_BYTES).decode()
        values = parse_yaml(text, CONFIG_FILE)
    except FileNotFoundError:
        return {}, [], ""
    except (OSError, ValueError) as error:
        return {}, [], f"cannot read {CONFIG_FILE}: {error}"
    except ConfigError as error:
        return {}, [], error.problem
    header = []
    for line in text.split("\n", _MAX_HEADER)[:_MAX_HEADER]:
        if not line.startswith("#"):
            break
        header.append(plain(line.lstrip("#").strip()))
    is_config = isinstance(values, dict)
    return (values, header, "") if is_config else ({}, header, f"{CONFIG_FILE} holds no fields")


def flat(values: Mapping[Any, Any]) -> dict[str, str]:
    """Return the values of nested mappings as text, by names with dots."""
    return {plain(name): value_text(value) for name, value in flattened(values)}


def number_text(value: Any, form: str) -> str:
    """Return a number in a format, or a shorter one if it is huge; anything else as it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or abs(value) >= 1e300:
        return value_text(value)
    return format(float(value), form if abs(value) < 1e9 else ".4g")


def metrics_text(metrics: Mapping[Any, Any], separator: str = "  ") -> str:
    """Return metrics as text: names and values."""
    return separator.join(f"{plain(str(name))} {metric_text(value)}" for name, value in metrics.items())


def metric_text(value: Any) -> str:
    """Return the value of a metric as text; null stands for one that is not finite."""
    return "no number" if value is None else number_text(value, ".4f")


def value_text(value: Any) -> str:
    """Return a value as text; nothing for null."""
    if isinstance(value, int) and not isinstance(value, bool):
        return plain(f"{value:,}")
    return "" if value is None else plain(str(value))


def plain(text: str) -> str:
    """Return text without what could control the terminal, shortened."""
    shown = printable(text[: _MAX_SHOWN + 1], lines=False)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."


def describe_broken(numbers: Sequence[int]) -> str:
    """Return a sentence about lines that hold no record, whose numbers count from 1; nothing for none."""
    if not numbers:
        return ""
    lines = counted(len(numbers), "line")
    return f"{METRICS_FILE}: {lines} without a record, left out; the first is line {numbers[0]:,}"


def read_records(run_dir: Path, broken: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's log, if there is one; note the numbers of lines without a record."""
    try:
        for number, line in enumerate(lines_of(run_dir / METRICS_FILE, follow=True), 1):
            if (record := parse_record(line)) is not None:
                yield record
            elif line.endswith(b"\n") and broken is not None:  # one that does not is being written
                broken.append(number)
    except FileNotFoundError:
        return


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record that a line of a log holds, which has a step; None if it holds none."""
    record = parse_line(line)
    return record if record is not None and count_of(record.get("step")) is not None else None


def metrics_in(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a record: they stand between the epoch and the learning rate."""
    names = list(record)
    first = names.index("epoch") + 1 if "epoch" in names else 0
    last = names.index("learning_rate") if "learning_rate" in names else first
    return {plain(name): record[name] for name in names[first:last]}


def number(value: Any) -> float | None:
    """Return a number of a record as a float: NaN for null, which stands for one that is not finite."""
    if type(value) is float:  # most are
        return value
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def count_of(value: Any) -> int | None:
    """Return a number of steps of a record; None for what is none, or is larger than any can be."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_COUNT
    return value if is_count else None


def describe_event(record: Mapping[str, Any]) -> str:
    """Return a text for a record of the phase ``event``: a change of the workers."""
    if record.get("event") != "changed":
        return plain(str(record.get("event", "event")))
    left, joined = (
        tuple(map(str, value)) if isinstance(value := record.get(name), list) else ()
        for name in ("left", "joined")
    )
    pause = number(record.get("pause_seconds"))
    seconds = pause if pause is not None and math.isfinite(pause) else 0.0
    change = WorkersChange(left, joined, str(record.get("cause") or ""), 0, seconds)
    return plain(change.describe(count_of(record.get("workers")) or 0, record["step"]))
