"""Events of a run in words."""

import math
from collections.abc import Mapping
from typing import Any

from hvdtrain.metric_names import LINE_FIELDS
from hvdtrain.reporting.log_records import number
from hvdtrain.reporting.records import WorkersChange
from hvdtrain.reporting.stored_runs import plain, value_text


def describe_event(record: Mapping[str, Any]) -> str:
    """Return what a record of the phase ``event`` says, in words."""
    if record.get("event") == "changed":
        return plain(_change(record).describe(_count(record.get("workers")), _count(record.get("step"))))
    values = {name: value for name, value in record.items() if name not in {*LINE_FIELDS, "event"}}
    parts = [
        f"{plain(name)} {_shown(value)}" for name, value in values.items() if value not in (None, [], "")
    ]
    return "; ".join([plain(str(record.get("event", "event"))), *parts])


def _change(record: Mapping[str, Any]) -> WorkersChange:
    left, joined = (_texts(record.get(name)) for name in ("left", "joined"))
    pause = number(record.get("pause_seconds"))
    seconds = pause if pause is not None and math.isfinite(pause) else 0.0
    return WorkersChange(left, joined, str(record.get("cause") or ""), 0, seconds)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _shown(value: Any) -> str:
    return ", ".join(map(value_text, value)) if isinstance(value, list) else value_text(value)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
