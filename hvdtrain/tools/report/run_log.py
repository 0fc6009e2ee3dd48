"""What the log of a run holds: curves and events."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.early_stopping import LINE_FIELDS
from hvdtrain.reporting.log_records import LogReader, number
from hvdtrain.reporting.records import CALLBACK, EVAL, EVENT, TRAIN
from hvdtrain.reporting.stored_runs import plain

Numbers = NDArray[np.float64]
AXES = ("step", "epoch", "samples", "seconds")
WORKERS = "workers"
_NO_CURVES = LINE_FIELDS - {WORKERS}
_LARGEST = 1e30  # beyond it, numbers are not drawn: the others would be a line


@dataclass(frozen=True)
class Curve:
    """Numbers of one name, in the order of the log.

    Attributes:
        phase: "train", "eval" or "callback".
        name: their name in the log.
        axes: where each of them lies, by the names in ``AXES``.
        values: the numbers; NaN for those that are not finite or too large to be drawn.
    """

    phase: str
    name: str
    axes: Mapping[str, Numbers]
    values: Numbers


@dataclass(frozen=True)
class RunLog:
    """What the log of a run holds.

    Attributes:
        curves: by phase and name.
        events: records of events.
        problem: what could not be read; empty if nothing was.
    """

    curves: Mapping[tuple[str, str], Curve] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    problem: str = ""

    def place_of(self, step: int) -> dict[str, float]:
        """Return where a step lies on each axis: at the last logged window up to it."""
        windows = [curve.axes for (phase, _), curve in self.curves.items() if phase == TRAIN]
        if not windows:
            return dict.fromkeys(AXES, np.nan) | {"step": float(step)}
        axes = max(windows, key=lambda found: len(found["step"]))
        index = int(np.searchsorted(axes["step"], step, side="right")) - 1
        place = {name: float(axes[name][index]) if index >= 0 else 0.0 for name in AXES}
        return place | {"step": float(step)}


def read_log(path: Path) -> RunLog:
    """Read the log of a run; what cannot be read is left out and named."""
    columns: dict[tuple[str, str], array[float]] = {}
    events, problem = [], ""
    try:
        for record in LogReader(path).records():
            phase = str(record.get("phase"))
            if phase == EVENT:
                events.append(record)
            elif phase in (TRAIN, EVAL, CALLBACK):
                place = place_in(record).values()
                for name, value in record.items():
                    if name not in _NO_CURVES and (found := number(value)) is not None:
                        columns.setdefault((phase, name), array("d")).extend((*place, found))
    except OSError as error:
        problem = f"its log cannot be read: {error}"
    return RunLog({key: _curve(*key, column) for key, column in columns.items()}, events, problem)


def place_in(record: Mapping[str, Any]) -> dict[str, float]:
    """Return where a record lies on each axis; NaN where it does not say so."""
    found = {axis: number(record.get(axis)) for axis in AXES}
    return {axis: np.nan if value is None else value for axis, value in found.items()}


def _curve(phase: str, name: str, column: "array[float]") -> Curve:
    *places, values = np.array(column).reshape(-1, len(AXES) + 1).T
    with np.errstate(invalid="ignore"):
        drawn = np.where(np.abs(values) <= _LARGEST, values, np.nan)
    return Curve(phase, plain(name), dict(zip(AXES, places, strict=True)), drawn)
