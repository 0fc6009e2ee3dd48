"""What happened to a run, in order: starts, resumes, changes of its workers, skipped samples, its end."""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdtrain.reporting.event_sessions import Session, sessions_in
from hvdtrain.reporting.log_records import count_of
from hvdtrain.reporting.run_status import ending_of
from hvdtrain.reporting.stored_runs import plain, value_text
from hvdtrain.run_views.curves import AXES, RunLog
from hvdtrain.run_views.event_texts import describe_event
from hvdtrain.run_views.run_event import RunEvent
from hvdtrain.run_views.skips import skips_in
from hvdtrain.storage.text import counted

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
