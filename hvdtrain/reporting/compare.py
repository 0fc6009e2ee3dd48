"""Runs side by side: a row for each, with its results and what differs in its config."""

import csv
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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
    steps: Any = None  # steps done
    seconds: Any = None  # the time that it trained
    samples_per_second: Any = None  # the median of the logged windows
    peak_memory_mib: Any = None  # the most memory that a worker has had
    # fields of the config as text; those of mappings by names with dots
    config: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""  # why something is not known; empty if all is


def row_of(name: str, run: StoredRun) -> Row:
    """Return what is compared of a run; what its summary does not say is taken from its log."""
    broken, problems = list[int](), [run.config_problem, run.summary_problem]
    last: Mapping[str, Any] = {}  # record, also of a phase
    of_phase: dict[Any, Mapping[str, Any]] = {}
    best: dict[str, Best] = {}
    speeds = array("d")
    try:
        for record in read_records(run.path, broken):
            last = of_phase[record.get("phase")] = record
            if record.get("phase") == EVAL:
                _take_best(best, run.config, record["step"], metrics_in(record))
            elif record.get("phase") == TRAIN:
                speed = number(record.get("samples_per_second"))
                speeds.extend([speed] if speed is not None and math.isfinite(speed) else [])
    except OSError as error:
        problems.append(f"cannot read {METRICS_FILE}: {error}")
    summary = run.summary or {
        **{key: last[key] for key in ("workers", "seconds", PEAK_MEMORY) if key in last},
        "steps": last.get("step", 0),
        "samples_per_second": median(speeds) if speeds else None,
        "final": metrics_in(of_phase.get(EVAL, {})),
    }
    final = {plain(str(key)): value for key, value in summary["final"].items()}
    if not best:
        _take_best(best, run.config, summary.get("steps"), final)
    facts = {key: value_text(run.config[key]) for key in ("framework", "task") if key in run.config}
    facts |= {key: value_text(summary[key]) for key in FACTS if key in summary} | {"status": run.status}
    if isinstance(sets := summary.get("eval_sets"), list):
        facts["eval sets"] = plain(", ".join(map(str, sets)))
    return Row(
        name,
        run.path,
        facts,
        last=final or metrics_in(of_phase.get(TRAIN, {})),
        best=best,
        is_trained_only=not final,
        steps=summary.get("steps"),
        seconds=summary.get("seconds"),
        samples_per_second=summary.get("samples_per_second"),
        peak_memory_mib=summary.get(PEAK_MEMORY),
        config=flat({key: value for key, value in run.config.items() if key not in _NOT_COMPARED}),
        problem="; ".join(filter(None, [*problems, describe_broken(broken)])),
    )


def _take_best(
    best: dict[str, Best], config: Mapping[str, Any], step: Any, metrics: Mapping[str, Any]
) -> None:
    """Keep the metrics of an evaluation that are better than those known."""
    for name, value in metrics.items():
        found, known = number(value), best.get(name)
        if found is not None and goal_of(config, name).improves(found, known and known.value):
            best[name] = Best(found, step if isinstance(step, int) else None)


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


def metric_names(rows: Sequence[Row], is_trained_only: bool = False) -> list[str]:
    """Return the metrics of the runs, those of evaluations or those of runs that have none; the loss last."""
    found = (name for row in rows if row.is_trained_only == is_trained_only for name in row.last)
    return list(dict.fromkeys(found))[::-1]


_COLUMNS = ("framework", "status")  # the facts that are columns of the table if they differ
_BEST, _TRAINING = "best ", "train "  # before the names of metrics
_SECONDS, _SPEED, _STEPS = "seconds", "samples/s", "steps"
_FORMS = {_SECONDS: ".1f", _SPEED: ",.0f"}


def values_of(row: Row) -> dict[str, Any]:
    """Return the numbers of a run by column."""
    before = _TRAINING if row.is_trained_only else ""
    found = {f"{_BEST}{name}": best.value for name, best in row.best.items()}
    found |= {f"{before}{name}": value for name, value in row.last.items()}
    return found | {_SECONDS: row.seconds, _SPEED: row.samples_per_second, _STEPS: row.steps}


def print_table(run_dirs: Iterable[Path], sort: str | None = None) -> None:
    """Print a table with a row per run, of which one without a summary is shown as far as its log goes."""
    rows, notes = _read(run_dirs, sort)
    of_runs = {name: [row.facts.get(name, "") for row in rows] for name in FACTS}
    common = {name: values[0] for name, values in of_runs.items() if len(set(values)) == 1}
    facts = [name for name in _COLUMNS if name not in common]
    columns = sorted(_columns(rows), key=lambda name: sort is None or name != _column_of(sort))
    table = [["run", *columns, *facts]]
    for row in rows:
        values = values_of(row)
        numbers = [number_text(values.get(name), _FORMS.get(name, ".4f")) for name in columns]
        table.append([row.name, *numbers, *(row.facts.get(fact, "") for fact in facts)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    for first, *cells in table:
        padded = [f"{first:<{widths[0]}}"]
        for place, (cell, width) in enumerate(zip(cells, widths[1:], strict=True)):
            padded.append(f"{cell:>{width}}" if place < len(columns) else f"{cell:<{width}}")
        print("  ".join(padded).rstrip())
    if known := ", ".join(f"{name} {value}" for name, value in common.items() if value):
        print(f"{'in all runs: ' if len(rows) > 1 else ''}{known}")
    # the facts and config fields that differ and are no columns
    other_facts = [name for name in FACTS if name not in _COLUMNS and name not in common]
    fields = differing_fields(rows)
    if other_facts or fields:
        print("what differs:")
    for row in rows if other_facts or fields else ():
        parts = [f"{fact} {row.facts[fact]}" for fact in other_facts if row.facts.get(fact)]
        parts += [f"{key} {row.config[key] or 'null'}" for key in fields if key in row.config]
        print(f"  {row.name:<{widths[0]}}  {', '.join(parts) or 'its config is unknown'}")
    for note in notes:
        print(note)


def print_csv(run_dirs: Iterable[Path], sort: str | None = None) -> None:
    """Print comma-separated values, as ``print_table``: numbers as they are, and the fields that differ."""
    rows, notes = _read(run_dirs, sort)
    fields = differing_fields(rows)
    table = []
    for row in rows:
        cells: dict[str, Any] = {"run": row.name, **row.facts, **values_of(row)}
        cells |= {f"best_step {name}": best.step for name, best in row.best.items()}
        table.append(cells | {f"config.{name}": row.config.get(name) for name in fields})
    names = list(dict.fromkeys(name for cells in table for name in cells))
    for cells in table:  # a spreadsheet would take some texts for formulas
        texts = {name: text for name, text in cells.items() if isinstance(text, str)}
        cells |= {n: f"'{text}" for n, text in texts.items() if text.startswith(("=", "+", "-", "@", "\t"))}
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerows([names, *([cells.get(name) for name in names] for cells in table)])
    for note in notes:
        print(note, file=sys.stderr)


def _read(run_dirs: Iterable[Path], sort: str | None) -> tuple[list[Row], list[str]]:
    """Return the rows in their order, and what to say of runs that are not shown, or not wholly."""
    paths, left_out = find_runs(run_dirs)
    rows = [row_of(name, read_run(path)) for name, path in zip(names_of(paths), paths, strict=True)]
    notes = [*(f"{row.name}: {row.problem}" for row in rows if row.problem), *left_out]
    return rows if sort is None else _sorted(rows, sort), [plain(f"note: {note}") for note in notes]


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns with numbers; the best values have one if they are not the last ones."""
    names: list[str] = []
    for name in metric_names(rows):
        known = [row for row in rows if not row.is_trained_only and name in row.best]
        pairs = [(row.best[name].value, row.last.get(name)) for row in known]
        differ = any(number_text(best, ".4f") != number_text(last, ".4f") for best, last in pairs)
        names += [name, f"{_BEST}{name}"] if differ else [name]
    names += [f"{_TRAINING}{metric}" for metric in metric_names(rows, is_trained_only=True)]
    return [*names, _SECONDS, _SPEED]


def _column_of(sort: str) -> str:
    """Return the column that ``--sort`` names, without ":min" or ":max"."""
    return sort.removesuffix(":min").removesuffix(":max")


def _sorted(rows: Sequence[Row], sort: str) -> list[Row]:
    """Return the runs sorted by a column, the best first and those that have no number there last."""
    column, way = _column_of(sort), sort[len(_column_of(sort)) + 1 :]
    known = dict.fromkeys(name for row in rows for name in values_of(row))
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

    def key(row: Row) -> float:
        found = number(values_of(row).get(column))  # NaN for None
        if found is None or not math.isfinite(found):
            return math.inf
        return -found if highest else found

    return sorted(rows, key=key)
