"""What happened to a run, in order: starts, resumes, changes of its workers, skipped samples, its end."""

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from hvdtrain.early_stopping import BAD_SAMPLES
from hvdtrain.reporting.log_records import count_of, describe_event
from hvdtrain.reporting.records import EVAL, TRAIN
from hvdtrain.reporting.stored_runs import ending_of, plain, value_text
from hvdtrain.storage.files import open_regular
from hvdtrain.storage.text import counted
from hvdtrain.tools.report.chart_plan import AXES, RunLog


class RunEvent(NamedTuple):
    """Something that happened to a run.

    Attributes:
        kind: "started", "resumed", "workers", "problem" or "ended"; another word for events of other kinds.
        text: it in words.
        place: where it happened, by axis; empty if that is not known.
        time: when, in UTC; empty if that is not known.
    """

    kind: str
    text: str
    place: Mapping[str, float]
    time: str = ""

    def at(self, axis: str, form: str) -> str:
        """Return where it happened on an axis, as text; nothing if that is not known."""
        value = self.place.get(axis, math.nan)
        return form.format(value) if math.isfinite(value) else ""


_MOST_SKIPS = 20  # ranges of steps, or of evaluations, that are listed one by one
_LARGEST = 2**53


class _Range(NamedTuple):
    """Records next to one another in all of which samples were skipped.

    Attributes:
        first: the first step of the first record.
        last: the step of the last record.
        samples: how many were skipped.
        records: the number of records.
    """

    first: int
    last: int
    samples: int
    records: int

    def with_range(self, other: "_Range") -> "_Range":
        """Return this range and a later one as one."""
        return _Range(self.first, other.last, self.samples + other.samples, self.records + other.records)


def skips_in(log: RunLog) -> list[tuple[int, RunEvent]]:
    """Return where samples were skipped, with the steps to sort by: windows and evaluations."""
    events = []
    for phase in (TRAIN, EVAL):
        found = _ranges(log, phase)
        rest = found[_MOST_SKIPS - 1 :] if len(found) > _MOST_SKIPS else []
        shown = found[: -len(rest)] if rest else found
        texts = [(one.last, _text(phase, one)) for one in shown]
        if rest:
            joined = rest[0]
            for one in rest[1:]:
                joined = joined.with_range(one)
            texts.append((joined.last, f"{_text(phase, joined)} ({len(rest):,} separate ranges of steps)"))
        events += [(step, RunEvent("problem", text, log.place_of(step))) for step, text in texts]
    return events


def _ranges(log: RunLog, phase: str) -> list[_Range]:
    curve = log.curves.get((phase, BAD_SAMPLES))
    if curve is None:
        return []
    steps = log.axes_of(phase)["step"]
    found: list[_Range] = []
    last_place = -1
    for step, value in zip(curve.axes["step"], curve.values, strict=True):
        if not 0 < value < _LARGEST:
            continue
        place = int(np.searchsorted(steps, step))
        begins = int(steps[place - 1]) + 1 if place else 1
        one = _Range(begins if phase == TRAIN else int(step), int(step), int(value), 1)
        if found and place == last_place + 1:
            found[-1] = found[-1].with_range(one)
        else:
            found.append(one)
        last_place = place
    return found


def _text(phase: str, of: _Range) -> str:
    """Return what was skipped, and where, in words."""
    skipped = f"{counted(of.samples, 'sample')} could not be read and {'was' if of.samples == 1 else 'were'}"
    steps = f"steps {of.first:,} to {of.last:,}"
    if phase == TRAIN:
        return f"{skipped} skipped in {steps if of.first < of.last else f'step {of.last:,}'}"
    if of.records == 1:
        return f"{skipped} left out of the evaluation at step {of.last:,}"
    return f"{skipped} left out, added up over {of.records:,} evaluations at {steps}"


_NAME = re.compile(r"events\.out\.tfevents\.(\d{1,11})\.\d+\.hvdtrain")
_FIRST_BYTES = 4096  # they hold the first record, and the second unless it has many scalars


class Session(NamedTuple):
    """That a process began to write an event file.

    Attributes:
        began: when, in seconds since 1970.
        resumed_step: steps that were done, if the run resumed; None if it began.
    """

    began: float
    resumed_step: int | None


def sessions_in(folder: Path) -> list[Session]:
    """Return when processes began to write event files in a run directory, in order.

    Files that cannot be read, or are not hvdtrain's, are left out.
    """
    try:
        matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except OSError:
        return []
    found = []
    for _, path in sorted((int(match[1]), path) for match, path in matches if match):
        try:
            with open_regular(path) as file:
                found.append(_session(file.read(_FIRST_BYTES)))
        except (OSError, ValueError, DecodeError, struct.error):
            continue
    return found


def _session(content: bytes) -> Session:
    """Read the first two records of an event file; raises ValueError, DecodeError or struct.error."""
    first, second = map(Event.FromString, _first_records(content))
    if not first.wall_time or not math.isfinite(first.wall_time):
        raise ValueError("no time")
    return Session(first.wall_time, second.step - 1 if second.HasField("session_log") else None)


def _first_records(content: bytes) -> Iterator[bytes]:
    """Yield the data of two records; the second is empty if there is none."""
    place = 0
    for _ in range(2):
        length = struct.unpack_from("<Q", content, place)[0] if place < len(content) else 0
        yield content[place + 12 : place + 12 + length]
        place += 16 + length


_MOST = 200  # events that are listed


def history_of(path: Path, log: RunLog, summary: Mapping[str, Any] | None) -> list[RunEvent]:
    """Return what happened to a run, in the order of its steps."""
    placed = [*_starts(sessions_in(path), log), *_of_log(log), *skips_in(log)]
    placed.sort(key=lambda found: found[0])
    events = [event for _, event in placed]
    left_out = log.events_left_out + max(0, len(events) - _MOST)
    if left_out:
        earlier = RunEvent("problem", f"{counted(left_out, 'earlier event')} left out", {})
        events = [earlier, *events[-_MOST:]]
    return [*events, *_of_summary(summary or {}, log)]


def _starts(sessions: list[Session], log: RunLog) -> list[tuple[int, RunEvent]]:
    """Return starts and resumes with the steps to sort them by.

    Those of a new rank 0 of an elastic job are not among them: the log has a change of the workers there.
    """
    changes = Counter(record["step"] for record in log.events if record.get("event") == "changed")
    events = []
    for index, session in enumerate(sessions):
        time = _time_text(session.began)
        # with --resume in a new directory, a job begins after step 0
        if session.resumed_step is None or (index == 0 and session.resumed_step == 0):
            started = RunEvent("started", "training started", dict.fromkeys(AXES, 0.0), time)
            events.append((0, started))
            continue
        step = count_of(session.resumed_step)
        if step is None:
            continue
        later = min((other.resumed_step or 0 for other in sessions[index + 1 :]), default=step)
        if later < step:
            text = f"resumed after step {step:,}; what it trained was done again from step {later + 1:,} on"
            events.append((later, RunEvent("resumed", text, {}, time)))
        elif changes[step]:
            changes[step] -= 1
        else:
            events.append(
                (step, RunEvent("resumed", f"resumed after step {step:,}", log.place_of(step), time))
            )
    return events


def _of_log(log: RunLog) -> list[tuple[int, RunEvent]]:
    events = []
    for record in log.events:
        kind = "workers" if record.get("event") == "changed" else plain(str(record.get("event", "event")))
        place = {name: _float(record.get(name)) for name in AXES}
        events.append((record["step"], RunEvent(kind, describe_event(record), place)))
    return events


def _of_summary(summary: Mapping[str, Any], log: RunLog) -> list[RunEvent]:
    """Return what a summary tells: of the whole run, without a step."""
    events = []
    if isinstance(skipped := summary.get("bad_samples"), int) and skipped:
        text = f"{counted(skipped, 'sample')} could not be read and were skipped since the last start"
        events.append(RunEvent("problem", text, {}))
    if isinstance(failed := summary.get("failed_saves"), int) and failed:
        text = f"{counted(failed, 'checkpoint')} could not be written; the last: {summary.get('save_error')}"
        events.append(RunEvent("problem", plain(text), {}))
    elif summary.get("save_error"):
        events.append(RunEvent("problem", plain(str(summary["save_error"])), {}))
    if summary.get("stopped_early"):
        events.append(RunEvent("ended", plain(f"stopped early: {summary['stopped_early']}"), {}))
    if summary:
        text = f"{ending_of(summary)} after {value_text(summary.get('steps'))} steps"
        error = f": {summary['error']}" if summary.get("error") else ""
        steps = count_of(summary.get("steps"))
        place = {} if steps is None else log.place_of(steps)
        events.append(RunEvent("ended", plain(text + error), place))
    return events


def _time_text(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return ""


def _float(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else float("nan")
