"""What the files of a run say: its curves, and what happened to it from its start to its end."""

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.callbacks import CALLBACK, EVAL, EVENT, TRAIN
from hvdtrain.early_stopping import LINE_FIELDS
from hvdtrain.reporting.jsonl import lines_of
from hvdtrain.reporting.report import PROVENANCE_FILE
from hvdtrain.reporting.stored_runs import (
    count_of,
    describe_event,
    ending_of,
    number,
    plain,
    read_records,
    value_text,
)
from hvdtrain.storage.files import parse_line
from hvdtrain.storage.text import counted

Numbers = NDArray[np.float64]
AXES = ("step", "epoch", "samples", "seconds")
WORKERS = "workers"
_NO_CURVES = LINE_FIELDS - {WORKERS}
_MOST = 200  # events that are listed
_LARGEST = 1e30  # beyond it, numbers are not drawn: the others would be a line


@dataclass(frozen=True)
class Curve:
    """Numbers of one name, in the order of the log."""

    phase: str  # "train", "eval" or "callback"
    name: str  # their name in the log
    axes: Mapping[str, Numbers]  # where each of them lies, by the names in ``AXES``
    values: Numbers  # the numbers; NaN for those that are not finite or too large to be drawn


@dataclass(frozen=True)
class RunLog:
    """What the log of a run holds."""

    curves: Mapping[tuple[str, str], Curve] = field(default_factory=dict)  # by phase and name
    events: Sequence[Mapping[str, Any]] = ()  # records of events
    problem: str = ""  # what could not be read; empty if nothing was


def read_log(path: Path) -> RunLog:
    """Read the log of a run; what cannot be read is left out and named."""
    columns: dict[tuple[str, str], array[float]] = {}
    events, problem = [], ""
    try:
        for record in read_records(path):
            phase = str(record.get("phase"))
            if phase == EVENT:
                events.append(record)
            elif phase in (TRAIN, EVAL, CALLBACK):
                found = [number(record.get(axis)) for axis in AXES]
                place = [np.nan if value is None else value for value in found]
                for name, value in record.items():
                    if name not in _NO_CURVES and (drawn := number(value)) is not None:
                        columns.setdefault((phase, name), array("d")).extend((*place, drawn))
    except OSError as error:
        problem = f"its log cannot be read: {error}"
    return RunLog({key: _curve(*key, column) for key, column in columns.items()}, events, problem)


def _curve(phase: str, name: str, column: "array[float]") -> Curve:
    *places, values = np.array(column).reshape(-1, len(AXES) + 1).T
    with np.errstate(invalid="ignore"):
        drawn = np.where(np.abs(values) <= _LARGEST, values, np.nan)
    return Curve(phase, plain(name), dict(zip(AXES, places, strict=True)), drawn)


class RunEvent(NamedTuple):
    """Something that happened to a run."""

    kind: str  # "started", "resumed", "workers", "problem" or "ended"
    text: str  # what happened
    step: int | None = None  # after which step; None if that is not known
    time: str = ""  # when, in UTC; empty if that is not known


def history_of(path: Path, log: RunLog, summary: Mapping[str, Any] | None) -> list[RunEvent]:
    """Return what happened to a run, in the order of its steps, and what its summary says of all of it."""
    events = [RunEvent("workers", describe_event(record), record["step"]) for record in log.events]
    with suppress(OSError):
        for start in filter(None, map(parse_line, lines_of(path / PROVENANCE_FILE))):
            step, time = count_of(start.get("step")) or 0, ""
            with suppress(OverflowError, ValueError, OSError):
                found = datetime.fromisoformat(str(start.get("time"))).astimezone(UTC)
                time = f"{found:%Y-%m-%d %H:%M:%S} UTC"
            kind, text = "resumed" if step else "started", f"resumed after step {step:,}"
            events.append(RunEvent(kind, text if step else "training started", step, time))
    events.sort(key=lambda event: (event.step or 0, event.kind == "workers"))
    if (left_out := len(events) - _MOST) > 0:
        events = [RunEvent("problem", f"{counted(left_out, 'earlier event')} left out"), *events[left_out:]]
    if not summary:
        return events
    skipped, failed = (count_of(summary.get(name)) for name in ("bad_samples", "failed_saves"))
    problems = [f"{counted(skipped, 'unreadable sample')} skipped since the last start"] if skipped else []
    problems += [f"{counted(failed, 'checkpoint')} could not be written"] if failed else []
    problems += [str(summary["save_error"])] if summary.get("save_error") else []
    events += [RunEvent("problem", plain(text)) for text in problems]
    if summary.get("stopped_early"):
        events.append(RunEvent("ended", plain(f"stopped early: {summary['stopped_early']}")))
    text = f"{ending_of(summary)} after {value_text(summary.get('steps'))} steps"
    text += f": {summary['error']}" if summary.get("error") else ""
    return [*events, RunEvent("ended", plain(text), count_of(summary.get("steps")))]
