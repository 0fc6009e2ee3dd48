"""The curves of a run, from its log: numbers of windows, evaluations and callbacks."""

import math
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.metric_names import LINE_FIELDS
from hvdtrain.reporting.log_records import LogReader, number
from hvdtrain.reporting.records import CALLBACK, EVAL, EVENT, TRAIN
from hvdtrain.reporting.stored_runs import plain

Numbers = NDArray[np.float64]
AXES = ("step", "epoch", "samples", "seconds")
WORKERS = "workers"
_MOST_CURVES = 100  # of a phase of a run: a log of somebody else may have any number of names
_MOST_EVENTS = 10_000
_NO_CURVES = frozenset(LINE_FIELDS) - {WORKERS}


@dataclass(frozen=True)
class Curve:
    """Numbers of one name, in the order of the log.

    Attributes:
        phase: "train", "eval" or "callback".
        name: what the log calls them.
        axes: where each of them stands, by the names in ``AXES``.
        values: the numbers; NaN for those that are not finite.
    """

    phase: str
    name: str
    axes: Mapping[str, Numbers]
    values: Numbers

    def not_finite(self) -> Numbers:
        """Return the steps whose numbers are not finite."""
        return self.axes["step"][~np.isfinite(self.values)]

    def at(self, chosen: NDArray[np.intp]) -> "Curve":
        """Return some points of it."""
        axes = {name: values[chosen] for name, values in self.axes.items()}
        return Curve(self.phase, self.name, axes, self.values[chosen])


@dataclass
class RunLog:
    """What the log of a run holds.

    Attributes:
        curves: by phase and name.
        events: records of events, the last ones of them.
        events_left_out: how many came before these.
        last: the last record; empty if there is none.
        problem: what could not be read, or was left out; empty if nothing was.
    """

    curves: dict[tuple[str, str], Curve] = field(default_factory=dict)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))
    events_left_out: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def axes_of(self, phase: str) -> Mapping[str, Numbers]:
        """Return where the records of a phase lie: at the points of its longest curve; empty without one."""
        found = [curve.axes for (of_phase, _), curve in self.curves.items() if of_phase == phase]
        return max(found, key=lambda axes: len(axes["step"]), default={})

    def place_of(self, step: int) -> dict[str, float]:
        """Return where a step lies on each axis: at the last logged record up to it."""
        axes = self.axes_of(TRAIN)
        if not axes:
            return {"step": float(step), "epoch": np.nan, "samples": np.nan, "seconds": np.nan}
        index = int(np.searchsorted(axes["step"], step, side="right")) - 1
        found = {name: float(values[max(index, 0)]) if index >= 0 else 0.0 for name, values in axes.items()}
        return {**found, "step": float(step)}


class _Phase:
    """Columns of the records of a phase, while they are read."""

    def __init__(self) -> None:
        self.axes = {name: array("d") for name in AXES}
        self.columns: dict[str, tuple[array[int], array[float]]] = {}  # rows and values
        self.left_out = False

    def add(self, record: Mapping[str, Any]) -> None:
        row = len(self.axes["step"])
        for name, axis in self.axes.items():
            found = number(record.get(name))
            axis.append(math.nan if found is None else found)
        for name, value in record.items():
            if name in _NO_CURVES:
                continue
            found = value if type(value) is float else number(value)
            if found is None:
                continue
            if (column := self.columns.get(name)) is None:
                if len(self.columns) >= _MOST_CURVES:
                    self.left_out = True
                    continue
                column = self.columns[name] = array("q"), array("d")
            column[0].append(row)
            column[1].append(found)

    def curves(self, phase: str) -> dict[tuple[str, str], Curve]:
        axes = {name: np.array(column) for name, column in self.axes.items()}
        found = {}
        for name, (rows, numbers) in self.columns.items():
            chosen = np.array(rows, dtype=np.intp)
            values = np.array(numbers)
            values[~np.isfinite(values)] = np.nan
            at = {axis: column[chosen] for axis, column in axes.items()}
            found[phase, plain(name)] = Curve(phase, plain(name), at, values)
        return found


def read_log(path: Path) -> RunLog:
    """Read the log of a run; what cannot be read is left out and named."""
    log = RunLog()
    phases = {phase: _Phase() for phase in (TRAIN, EVAL, CALLBACK)}
    try:
        for record in LogReader(path).records():
            log.last = record
            phase = record.get("phase")
            if phase == EVENT:
                log.events_left_out += len(log.events) == _MOST_EVENTS
                log.events.append(record)
            elif phase in phases:
                phases[phase].add(record)
    except OSError as error:
        log.problem = f"its log cannot be read: {error}"
    for phase, columns in phases.items():
        log.curves |= columns.curves(phase)
        if columns.left_out:
            log.problem = (
                log.problem or f"only the first {_MOST_CURVES} names of numbers of a phase are drawn"
            )
    return log
