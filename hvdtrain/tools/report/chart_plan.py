"""Which charts a page has, and which curves of which runs each of them shows."""

import math
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.early_stopping import BAD_SAMPLES, LINE_FIELDS, PEAK_DEVICE_MEMORY, PEAK_MEMORY
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


LEAST = 40  # points that every curve may have


def thin(values: Numbers, limit: int) -> NDArray[np.intp]:
    """Return the indices of points that stand for a curve, in order.

    The curve is cut into buckets of neighbours. Of each of them, the lowest point, the highest one and one
    that is not finite stay. The first and the last point stay, too.

    Args:
        values: the points.
        limit: about how many stay; all if there are not more. Those that are not finite come on top.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    kept = {0, count - 1}
    for bucket in np.array_split(np.arange(count), max(1, (limit - 2) // 2)):
        is_finite = np.isfinite(values[bucket])
        finite, others = bucket[is_finite], bucket[~is_finite]
        if len(finite):
            kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
        if len(others):
            kept.add(int(others[0]))
    return np.array(sorted(kept), dtype=np.intp)


def points_for_each(lengths: Sequence[int], total: int) -> int:
    """Return how many points each curve may have, so that all curves together have about a total."""
    if sum(lengths) <= total:
        return max(lengths, default=LEAST)
    left, curves = total, len(lengths)
    for length in sorted(lengths):
        if length * curves > left:
            break
        left, curves = left - length, curves - 1
    return max(LEAST, left // max(curves, 1))


POINTS = 14_000  # of all curves of a page together: each takes about 30 bytes of it
_TOGETHER = 3  # runs whose training and evaluation are in one chart
_MOST_CHARTS = 60
_LOGARITHMIC = 300.0  # times the lowest value, from which on losses have a logarithmic axis
_LARGEST = 1e30  # beyond it, curves are not drawn: the others would be a line
# of training; evaluations have a learning rate and a speed, too, which are not drawn
_MEASURES = {
    "learning_rate": "Learning rate",
    "samples_per_second": "Throughput (samples/s)",
    "data_wait_fraction": "Waiting for data (fraction of the time)",
    "wait_fraction": "Waiting for the slowest worker (fraction of the time)",
    "slowest_rank": "Slowest rank",
    PEAK_MEMORY: "Peak memory of a worker (MiB)",
    PEAK_DEVICE_MEMORY: "Peak memory of a worker's GPU (MiB)",
    BAD_SAMPLES: "Samples that could not be read and were skipped",
    WORKERS: "Workers",
}
_DOTS = {"slowest_rank", BAD_SAMPLES}  # without lines between the points
_WHOLE = {"slowest_rank", BAD_SAMPLES, WORKERS}


@dataclass(frozen=True)
class Line:
    """A curve of a run.

    Attributes:
        run: the run's place among the runs.
        curve: its points, which may be fewer than the log has.
        total: how many the log has.
    """

    run: int
    curve: Curve
    total: int


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: what stands above it.
        lines: its curves.
        is_logarithmic: whether its vertical axis is.
        has_dots: whether its points are not joined.
        is_whole: whether its numbers are whole.
    """

    title: str
    lines: Sequence[Line]
    is_logarithmic: bool = False
    has_dots: bool = False
    is_whole: bool = False


@dataclass(frozen=True)
class ChartPlan:
    """The charts of a page, and what to say of them."""

    charts: Sequence[Chart]
    notes: Sequence[str]


def plan_charts(names: Sequence[str], logs: Sequence[RunLog]) -> ChartPlan:
    """Return the charts of runs.

    Args:
        names: the runs' names.
        logs: what their logs hold.
    """
    groups = _groups(logs)
    notes = _notes_on_numbers(names, [line for _, lines in groups for line in lines])
    if len(groups) > _MOST_CHARTS:
        notes.append(f"Only the first {_MOST_CHARTS} of {len(groups):,} charts are drawn.")
        groups = groups[:_MOST_CHARTS]
    lengths = [line.total for _, lines in groups for line in lines]
    limit = points_for_each(lengths, POINTS)
    if any(length > limit for length in lengths):
        notes.append(
            f"Curves of more than {limit:,} points are thinned out: of each {_each(lengths, limit)} "
            "neighbours, the lowest and the highest are drawn."
        )
    charts = [_chart(title, lines, limit) for title, lines in groups]
    return ChartPlan([chart for chart in charts if _has_numbers(chart)], notes)


def _has_numbers(chart: Chart) -> bool:
    return any(bool(np.isfinite(line.curve.values).any()) for line in chart.lines)


def _each(lengths: Sequence[int], limit: int) -> str:
    fewest, most = (
        max(2, round(2 * count / max(limit, LEAST)))
        for count in (min(length for length in lengths if length > limit), max(lengths))
    )
    return f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"


def _groups(logs: Sequence[RunLog]) -> list[tuple[str, list[Line]]]:
    """Return the curves of each chart with its title, in the order of the charts."""
    lines = [
        Line(run, curve, len(curve.values)) for run, log in enumerate(logs) for curve in log.curves.values()
    ]
    means = [line for line in lines if line.curve.phase in (TRAIN, EVAL) and line.curve.name not in _MEASURES]
    names = dict.fromkeys(line.curve.name for line in means)
    in_order = sorted(names, key=lambda name: (name != "loss", name.count("/")))
    groups: list[tuple[str, list[Line]]] = []
    for name in in_order:
        of_name = [line for line in means if line.curve.name == name]
        phases = {line.curve.phase for line in of_name}
        if len(logs) <= _TOGETHER or len(phases) == 1:
            only = {TRAIN: " in training", EVAL: " in evaluation"}[phases.pop()] if len(phases) == 1 else ""
            groups.append((_title(name) + only, of_name))
            continue
        for phase, ending in ((TRAIN, "training"), (EVAL, "evaluation")):
            of_phase = [line for line in of_name if line.curve.phase == phase]
            groups.append((f"{_title(name)} in {ending}", of_phase))
    for name, title in _MEASURES.items():
        of_name = [line for line in lines if line.curve.phase == TRAIN and line.curve.name == name]
        if of_name and (name != WORKERS or _changes(of_name)):
            groups.append((title, of_name))
    for name in dict.fromkeys(line.curve.name for line in lines if line.curve.phase == CALLBACK):
        of_name = [line for line in lines if (line.curve.phase, line.curve.name) == (CALLBACK, name)]
        if name != WORKERS:
            groups.append((f"{_title(name)} of a callback", of_name))
    return _told_apart(groups)


def _told_apart(groups: Sequence[tuple[str, list[Line]]]) -> list[tuple[str, list[Line]]]:
    """Return charts with the names of their curves in titles that are equal but for it."""
    counts = Counter(title for title, _ in groups)
    return [
        (title if counts[title] == 1 else f"{title} ({lines[0].curve.name})", lines)
        for title, lines in groups
    ]


def _title(name: str) -> str:
    return name[:1].upper() + name[1:]


def _changes(lines: Sequence[Line]) -> bool:
    """Return whether the number of workers of a run changes."""
    return any(len(np.unique(line.curve.values[np.isfinite(line.curve.values)])) > 1 for line in lines)


def _chart(title: str, lines: Sequence[Line], limit: int) -> Chart:
    drawn = [Line(line.run, _drawable(line.curve), line.total) for line in lines]
    thinned = [Line(line.run, line.curve.at(thin(line.curve.values, limit)), line.total) for line in drawn]
    name = lines[0].curve.name if lines else ""
    is_loss = name.rpartition("/")[2].rpartition("_")[2] == "loss"
    return Chart(title, thinned, is_loss and _spans_much(thinned), name in _DOTS, name in _WHOLE)


def _drawable(curve: Curve) -> Curve:
    values = np.where(np.abs(curve.values) > _LARGEST, np.nan, curve.values)
    return Curve(curve.phase, curve.name, curve.axes, values)


def _spans_much(lines: Sequence[Line]) -> bool:
    values = np.concatenate([line.curve.values for line in lines]) if lines else np.zeros(0)
    values = values[np.isfinite(values)]
    return bool(len(values) and values.min() > 0 and values.max() > _LOGARITHMIC * values.min())


def _notes_on_numbers(names: Sequence[str], lines: Sequence[Line]) -> list[str]:
    """Return which curves have gaps: numbers that are not finite, or too large to be drawn."""
    notes = []
    for line in lines:
        curve, what = line.curve, f"{names[line.run]}: {line.curve.name} ({_PHASES[line.curve.phase]})"
        if len(steps := curve.not_finite()):
            notes.append(
                f"{what}: {len(steps):,} of {line.total:,} numbers are NaN or infinite, or the mean of "
                f"nothing ({_steps_text(steps)}); the curve has gaps there."
            )
        if len(steps := curve.axes["step"][np.abs(curve.values) > _LARGEST]):
            notes.append(f"{what}: numbers beyond 1e30 are not drawn ({_steps_text(steps)}).")
    return notes


_PHASES = {TRAIN: "training", EVAL: "evaluation", CALLBACK: "callback"}


def _steps_text(steps: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> str:
    if len(steps) == 1:
        return f"step {steps[0]:,.0f}"
    return f"between step {steps[0]:,.0f} and step {steps[-1]:,.0f}"
