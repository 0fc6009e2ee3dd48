"""Runs side by side: a row for each, with its results and what differs in its config."""

import csv
import math
import re
import sys
import textwrap
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.callbacks import EVAL, TRAIN
from hvdtrain.early_stopping import PEAK_MEMORY, MetricGoal
from hvdtrain.errors import UsageError
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.reporting.stored_runs import (
    StoredRun,
    describe_broken,
    find_runs,
    flat,
    metrics_in,
    names_of,
    number,
    number_text,
    plain,
    read_records,
    read_run,
    value_text,
)

# facts of a run: those that are equal in all runs are shown once, below the table
FACTS = ("framework", "task", "status", "workers", "changes", "steps", "eval sets")
# fields of the config that are not shown as differences: facts, and where a run starts from
_NOT_COMPARED = {"framework", "task", "epochs", "steps"}
_GOALS = ("keep_best", "early_stopping", "plateau_metric")  # config fields that say which end is better


class Best(NamedTuple):
    """The best value of a metric."""

    value: float
    step: int | None  # the step of its evaluation; None if it is not known


@dataclass(frozen=True)
class Row:
    """What is compared of a run."""

    name: str  # the run's name among the others
    path: Path  # its directory
    facts: Mapping[str, str]  # values as text, by the names in ``FACTS``
    # metrics of the last evaluation, by name; of the last training window if there was none
    last: Mapping[str, Any]
    # their best values; without those that were never finite
    best: Mapping[str, Best] = field(default_factory=dict)
    is_trained_only: bool = False  # whether there was no evaluation
    seconds: Any = None  # the time that it trained
    samples_per_second: Any = None  # the median of the logged windows
    peak_memory_mib: Any = None  # the most memory that a worker has had
    # fields of the config as text; those of mappings by names with dots
    config: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""  # why something is not known; empty if all is


def row_of(name: str, run: StoredRun) -> Row:
    """Return what is compared of a run; what its summary does not say is taken from its log."""
    broken, problems = list[int](), [run.config_problem, run.summary_problem]
    log = LogState(run.config)
    try:
        for record in read_records(run.path, broken):
            log.take(record)
    except OSError as error:
        problems.append(f"cannot read {METRICS_FILE}: {error}")
    summary = run.summary or {
        **{key: log.last[key] for key in ("workers", "seconds", PEAK_MEMORY) if key in log.last},
        "steps": log.last.get("step", 0),
        "samples_per_second": median(log.speeds) if log.speeds else None,
        "final": metrics_in(log.evaluation),
    }
    last = {plain(str(key)): value for key, value in summary["final"].items()}
    if not log.best:
        log.take_best(summary.get("steps"), last)
    facts = {key: value_text(run.config[key]) for key in ("framework", "task") if key in run.config}
    facts |= {key: value_text(summary[key]) for key in FACTS if key in summary}
    facts["status"] = run.status
    if isinstance(sets := summary.get("eval_sets"), list):
        facts["eval sets"] = plain(", ".join(map(str, sets)))
    return Row(
        name,
        run.path,
        facts,
        last=last or metrics_in(log.window),
        best=log.best,
        is_trained_only=not last,
        seconds=summary.get("seconds"),
        samples_per_second=summary.get("samples_per_second"),
        peak_memory_mib=summary.get(PEAK_MEMORY),
        config=flat({key: value for key, value in run.config.items() if key not in _NOT_COMPARED}),
        problem="; ".join(filter(None, [*problems, describe_broken(broken)])),
    )


class LogState:
    """What the records of a log say until now, of a run with these fields of the config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.last: Mapping[str, Any] = {}  # the last record
        self.window: Mapping[str, Any] = {}  # the last record of a window
        self.evaluation: Mapping[str, Any] = {}  # the last record of an evaluation
        self.best: dict[str, Best] = {}  # best values of the metrics of evaluations
        self.speeds = array("d")  # samples per second of each window

    def take(self, record: Mapping[str, Any]) -> None:
        """Take a record."""
        self.last = record
        if record.get("phase") == EVAL:
            self.evaluation = record
            self.take_best(record["step"], metrics_in(record))
        elif record.get("phase") == TRAIN:
            self.window = record
            speed = number(record.get("samples_per_second"))
            if speed is not None and math.isfinite(speed):
                self.speeds.append(speed)

    def take_best(self, step: Any, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of an evaluation."""
        for name, value in metrics.items():
            found, known = number(value), self.best.get(name)
            if found is not None and goal_of(self.config, name).improves(found, known and known.value):
                self.best[name] = Best(found, step if isinstance(step, int) else None)


def goal_of(config: Mapping[str, Any], metric: str) -> MetricGoal:
    """Return which end of a metric is better: what the config says of it, or what its name does."""
    for name in _GOALS:
        try:
            goal = MetricGoal.parse(config[name])
        except (KeyError, ValueError):
            continue
        if goal.metric == metric:
            return goal
    return MetricGoal(metric, MetricGoal.parse(metric.partition(":")[0] or "metric").highest)


def differing_fields(rows: Sequence[Row]) -> list[str]:
    """Return the config fields that are not equal in all runs whose config is known."""
    configs = [row.config for row in rows if row.config]
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({config.get(name) for config in configs}) > 1]


def common_facts(rows: Sequence[Row]) -> dict[str, str]:
    """Return the facts that all runs have in common."""
    return {
        name: rows[0].facts.get(name, "")
        for name in FACTS
        if len({row.facts.get(name, "") for row in rows}) == 1
    }


def metric_names(rows: Sequence[Row], is_trained_only: bool = False) -> list[str]:
    """Return the metrics of the runs, those of evaluations or those of runs that have none; the loss last."""
    found = (name for row in rows if row.is_trained_only == is_trained_only for name in row.last)
    return list(dict.fromkeys(found))[::-1]


RUN = "run"
_HEAD_WIDTH = 13  # characters of a line of a column's title
_CELL_WIDTH = 16
_NAME_WIDTH = 16  # to which names of runs are wrapped before columns go into another table
_VALUE_WIDTH = 48  # of a config field that differs
_PARTS = re.compile(r"[^/_ ]*[/_ ]?")


def _tables_of(rows: Sequence[Mapping[str, str]], facts: Sequence[str], width: int) -> list[Table]:
    """Return tables with all columns, as many to a table as have room in a line, and the facts in each."""
    groups: list[list[str]] = [[]]
    short = [{**row, RUN: row[RUN][:_NAME_WIDTH]} for row in rows]
    for name in rows[0]:
        if name == RUN or name in facts:
            continue
        table = _table(short, [*groups[-1], name, *facts], ())
        if groups[-1] and Console(width=10_000).measure(table).maximum > width:
            groups.append([])
        groups[-1].append(name)
    return [_table(rows, [*group, *facts], facts) for group in groups]


def _table(rows: Sequence[Mapping[str, str]], columns: Sequence[str], facts: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column(RUN, overflow="fold")
    for name in columns:
        side: Literal["left", "right"] = "left" if name in facts else "right"
        title = Text("\n".join(_title_lines(name)), justify=side)  # a Text is not parsed as markup
        table.add_column(title, justify=side, no_wrap=True, overflow="ellipsis", max_width=_CELL_WIDTH)
    for row in rows:
        table.add_row(Text(row[RUN]), *(Text(row[name]) for name in columns))
    return table


def _title_lines(name: str) -> list[str]:
    """Return a column's title in lines, broken after spaces, slashes and underscores if need be."""
    lines = [""]
    for part in _PARTS.findall(name):
        if len((lines[-1] + part).rstrip()) > _HEAD_WIDTH and lines[-1]:
            lines.append("")
        lines[-1] += part
    pieces = [textwrap.wrap(line, _HEAD_WIDTH) or [""] for line in lines]
    return [piece for line in pieces for piece in line]


def _shortened(value: str) -> str:
    """Return a value with its middle left out if it is long; ``--csv`` has all of it."""
    if len(value) <= _VALUE_WIDTH:
        return value
    half = (_VALUE_WIDTH - 3) // 2
    return f"{value[:half]}...{value[-half:]}"


# the short facts that differ are columns of the table, the others stand below it
_COLUMNS = ("framework", "status")
_BEST, _TRAINING = "best ", "train "  # before the names of metrics
_SECONDS, _SPEED, _STEPS = "seconds", "samples/s", "steps"


def print_table(run_dirs: Iterable[Path], sort: str | None = None) -> None:
    """Print a table with a row per run, of which one without a summary is shown as far as its log goes.

    The best of the column ``sort`` comes first. Raises UsageError if there is no run, or no such column.
    """
    rows, notes = _read(run_dirs, sort)
    console = Console()
    facts = [name for name in _COLUMNS if name not in common_facts(rows)]
    columns = _columns(rows)
    columns.sort(key=lambda name: sort is None or name != _column_of(sort))
    for table in _tables_of([_cells(row, facts, columns) for row in rows], facts, console.width):
        console.print(table)
    common = ", ".join(f"{name} {value}" for name, value in common_facts(rows).items() if value)
    lines = [f"{'in all runs: ' if len(rows) > 1 else ''}{common}"] if common else []
    for line in [*lines, *_differences(rows, console.width), *notes]:
        console.print(Text(plain(line)), soft_wrap=True)


def print_csv(run_dirs: Iterable[Path], sort: str | None = None) -> None:
    """Print comma-separated values, as ``print_table``: numbers as they are, and the fields that differ."""
    rows, notes = _read(run_dirs, sort)
    metrics, trained = metric_names(rows), metric_names(rows, is_trained_only=True)
    fields = differing_fields(rows)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    head = ["run", "path", *(fact.replace(" ", "_") for fact in FACTS), _SECONDS, "samples_per_second"]
    head += [f"{kind}.{name}" for name in metrics for kind in ("last", "best", "best_step")]
    head += [f"train.{name}" for name in trained] + [f"config.{name}" for name in fields]
    writer.writerow(map(_cell, head))
    for row in rows:
        cells: list[Any] = [row.name, row.path]
        cells += [_without_commas(row.facts.get(fact, "")) for fact in FACTS]
        cells += [row.seconds, row.samples_per_second]
        for name in metrics:
            best = row.best.get(name)
            cells += [value_in(row, name), best and best.value, best and best.step]
        cells += [value_in(row, f"{_TRAINING}{name}") for name in trained]
        cells += [row.config.get(name) for name in fields]
        writer.writerow(map(_cell, cells))
    for line in notes:
        print(plain(line), file=sys.stderr)


def _read(run_dirs: Iterable[Path], sort: str | None) -> tuple[list[Row], list[str]]:
    """Return the rows, and what to say of runs that are not shown, or not wholly."""
    paths, left_out = find_runs(run_dirs)
    rows = [row_of(name, read_run(path)) for name, path in zip(names_of(paths), paths, strict=True)]
    if sort is not None:
        rows = _sorted(rows, sort)
    notes = [f"note: {row.name}: {row.problem}" for row in rows if row.problem]
    return rows, notes + [f"note: {note}" for note in left_out]


def _cells(row: Row, facts: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Return the cells of a run by column; the facts are the last."""
    forms = {_SECONDS: ".1f", _SPEED: ",.0f"}
    numbers = {name: number_text(value_in(row, name), forms.get(name, ".4f")) for name in columns}
    return {"run": row.name, **numbers, **{fact: row.facts.get(fact, "") for fact in facts}}


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns with numbers; the best values have one if they are not the last ones."""
    names: list[str] = []
    for name in metric_names(rows):
        known = [row for row in rows if not row.is_trained_only and name in row.best]
        shown = [
            (number_text(row.best[name].value, ".4f"), number_text(row.last.get(name), ".4f"))
            for row in known
        ]
        names += [name, f"{_BEST}{name}"] if any(best != last for best, last in shown) else [name]
    names += [f"{_TRAINING}{metric}" for metric in metric_names(rows, is_trained_only=True)]
    return [*names, _SECONDS, _SPEED]


def value_in(row: Row, column: str) -> Any:
    """Return what a run has in a column; None for nothing."""
    if column in (_SECONDS, _SPEED):
        return row.seconds if column == _SECONDS else row.samples_per_second
    if row.is_trained_only:
        return row.last.get(column.removeprefix(_TRAINING)) if column.startswith(_TRAINING) else None
    if column in row.last:
        return row.last[column]
    best = row.best.get(column.removeprefix(_BEST)) if column.startswith(_BEST) else None
    return None if best is None else best.value


def _differences(rows: Sequence[Row], width: int) -> list[str]:
    """Return a paragraph per run with the facts and config fields that differ and are no columns."""
    facts = [name for name in FACTS if name not in _COLUMNS and name not in common_facts(rows)]
    fields = differing_fields(rows)
    if not facts and not fields:
        return []
    indent = max(min(len(row.name), width // 3) for row in rows) + 4
    lines = ["what differs:"]
    for row in rows:
        parts = [f"{fact} {_shortened(row.facts[fact])}" for fact in facts if row.facts.get(fact)]
        parts += [f"{key} {_shortened(row.config[key] or 'null')}" for key in fields if key in row.config]
        text = ", ".join(parts) or "its config is unknown"
        head, space = f"  {row.name:<{indent - 4}}  ", " " * indent
        if len(head) > indent:  # a long name has a line of its own
            lines.append(head.rstrip())
            head = space
        room = max(20, width - indent) + indent
        lines += textwrap.wrap(
            text, room, initial_indent=head, subsequent_indent=space, break_on_hyphens=False
        )
    return lines


def _column_of(sort: str) -> str:
    """Return the column that ``--sort`` names, without ":min" or ":max"."""
    return sort[:-4] if sort.endswith((":min", ":max")) else sort


def _sorted(rows: Sequence[Row], sort: str) -> list[Row]:
    """Return the runs sorted by a column, the best first and those that have no number there last."""
    column = _column_of(sort)
    way = sort[len(column) + 1 :]
    known = [*(f"{prefix}{name}" for name in metric_names(rows) for prefix in ("", _BEST))]
    known += [f"{_TRAINING}{name}" for name in metric_names(rows, is_trained_only=True)]
    known += [_SECONDS, _SPEED, _STEPS]
    if column not in known:
        raise UsageError(
            f"--sort {plain(sort)}: no run has such a column",
            f"Columns: {', '.join(known)}. {column and column + ':min'} or :max says which end comes first.",
        )
    if way or column in (_SECONDS, _SPEED, _STEPS):
        highest = way == "max" if way else column != _SECONDS
    else:
        goals: Mapping[str, Any] = next((row.config for row in rows if row.config), {})
        highest = goal_of(goals, column.removeprefix(_BEST).removeprefix(_TRAINING)).highest

    def key(row: Row) -> tuple[bool, float]:
        text = _without_commas(row.facts.get(_STEPS, ""))
        value = int(text) if column == _STEPS and text.isdecimal() else value_in(row, column)
        found = None if value is None else number(value)
        if found is None or not math.isfinite(found):
            return True, 0.0
        return False, -found if highest else found

    return sorted(rows, key=key)


def _without_commas(text: str) -> str:
    """Return a whole number without the commas between its digits; other text as it is."""
    digits = text.replace(",", "")
    return digits if digits.isdecimal() else text


def _cell(value: Any) -> Any:
    """Return a value for a CSV file: text that a spreadsheet would take for a formula has a ' before it."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    text = plain(str(value))
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
    return text
