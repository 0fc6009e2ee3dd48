"""The lines of a run's log as records, read by those who look at runs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.reporting.jsonl import lines_of
from hvdtrain.reporting.records import WorkersChange
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.reporting.stored_runs import plain
from hvdtrain.storage.files import parse_line

_MAX_COUNT = 1 << 53  # beyond it, floats are not exact


def describe_broken(numbers: Sequence[int]) -> str:
    """Return a sentence about lines that hold no record, whose numbers count from 1; nothing for none."""
    if len(numbers) < 2:
        return f"line {numbers[0]:,} of {METRICS_FILE} holds no record and is left out" if numbers else ""
    return (
        f"{len(numbers):,} lines of {METRICS_FILE} hold no record and are left out; "
        f"the first is line {numbers[0]:,}"
    )


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
    """Return a number of a record as a float: NaN for null, which stands for one that is not finite.

    None is returned for what is no number.
    """
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
