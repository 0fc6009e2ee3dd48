"""What trackers are sent: lines of metrics.jsonl as numbers by name at a step."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.metric_names import LINE_FIELDS
from hvdtrain.reporting.records import EVENT, TRAIN


@dataclass(frozen=True)
class Row:
    """A line of metrics.jsonl.

    Attributes:
        step: the last step before it.
        seconds: when it was written, since the epoch of the system's clock.
        values: its numbers, by names that begin with the phase: "train/loss".
        axes: the samples and epochs until then.
        event: what it says of the workers of an elastic job, if it is of a change; empty otherwise.
        is_window: whether it is of a window of training, whose steps grow from one to the next.
        job: the number of the job that wrote it, the first one's being 1.
    """

    step: int
    seconds: float
    values: Mapping[str, float]
    axes: Mapping[str, float]
    event: str = ""
    is_window: bool = False
    job: int = 1


class Clock:
    """Tells when, and by which job of a run, a line was written.

    Args:
        starts: what is known of the jobs: each has a step, a time and the seconds spent training until then.
        zero: when training began, if no job says it.
    """

    def __init__(self, starts: Sequence[Mapping[str, Any]], zero: float) -> None:
        self._zero = zero
        self._known = [
            (start["step"], start["time"] - start["seconds"], number)
            for number, start in enumerate(starts, 1)
            if all(isinstance(start.get(name), int | float) for name in ("time", "seconds"))
        ]

    def job_at(self, step: int) -> tuple[float, int]:
        """Return when training began by the clock of the job that did a step, and that job's number."""
        # the last job that began before this step: a later job may have begun further back
        found = ((begun, number) for first, begun, number in reversed(self._known) if first < step)
        return next(found, (self._zero, 1))


def row_of(line: bytes, clock: Clock) -> Row | None:
    """Return a line as what trackers are sent; None if it is no line of a run."""
    try:
        record = json.loads(line)
        step, phase = record["step"], str(record["phase"])
        seconds = float(record.get("seconds") or 0.0)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(step, int) or not 0 <= step < 2**63 or not math.isfinite(seconds):
        return None
    numbers = {name: value for name, value in record.items() if _is_number(value) and name not in LINE_FIELDS}
    if phase == EVENT:
        numbers = {
            name: record[name] for name in ("workers", "pause_seconds") if _is_number(record.get(name, ""))
        }
    values = {f"{phase}/{name}": math.nan if v is None else float(v) for name, v in numbers.items()}
    axes = {name: float(record[name]) for name in ("samples", "epoch") if _is_number(record.get(name, ""))}
    event = _event(record) if phase == EVENT else ""
    begun, job = clock.job_at(step)
    return Row(step, begun + seconds, values, axes, event, is_window=phase == TRAIN, job=job)


def _is_number(value: object) -> bool:
    """Return whether a value is a number; None stands for one that is not finite."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _event(record: Mapping[str, Any]) -> str:
    parts = [f"{record.get('workers')} workers from step {record.get('step')} on"]
    for name in ("left", "joined"):
        if isinstance(named := record.get(name), list) and named:
            parts.append(f"{name}: {', '.join(map(str, named))}")
    return "; ".join(parts)
