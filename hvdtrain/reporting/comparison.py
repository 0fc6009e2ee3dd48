"""What is compared of runs: facts, results and config fields, a row for each run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hvdtrain.early_stopping import PEAK_MEMORY, MetricGoal
from hvdtrain.reporting.log_records import LogReader, metrics_in, number, parse_record
from hvdtrain.reporting.records import EVAL, TRAIN
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.reporting.stored_runs import StoredRun, flat, names_of, plain, read_run, value_text
from hvdtrain.storage.files import read_tail

# facts of a run: those that are equal in all runs are shown once, below the table
FACTS = ("framework", "task", "status", "workers", "changes", "steps", "eval sets")
# fields of the config that are not shown as differences: facts, and where a run starts from
_NOT_COMPARED = {"framework", "task", "epochs", "steps"}
_GOALS = ("keep_best", "early_stopping", "plateau_metric")  # config fields that say which end is better
_TAIL_BYTES = 1_000_000  # of metrics.jsonl


class Best(NamedTuple):
    """The best value of a metric.

    Attributes:
        value: the value.
        step: the step of its evaluation; None if it is not known.
    """

    value: float
    step: int | None


@dataclass(frozen=True)
class Row:
    """What is compared of a run.

    Attributes:
        name: the run's name among the others.
        path: its directory.
        facts: values as text, by the names in ``FACTS``.
        last: metrics of the last evaluation, by name; of the last training window if there was none.
        best: their best values; without those that were never finite.
        is_trained_only: whether there was no evaluation.
        seconds: the time that it trained.
        samples_per_second: the median of the logged windows.
        peak_memory_mib: the most memory that a worker has had.
        config: fields of the config as text; those of mappings by names with dots.
        problem: why something is not known; empty if all is.
    """

    name: str
    path: Path
    facts: Mapping[str, str]
    last: Mapping[str, Any]
    best: Mapping[str, Best] = field(default_factory=dict)
    is_trained_only: bool = False
    seconds: Any = None
    samples_per_second: Any = None
    peak_memory_mib: Any = None
    config: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """Read what is compared of runs."""
    return [row_of(name, read_run(path)) for name, path in zip(names_of(paths), paths, strict=True)]


def row_of(name: str, run: StoredRun) -> Row:
    """Return what is compared of a run; what its summary does not say is taken from its log."""
    facts = {key: value_text(run.config[key]) for key in ("framework", "task") if key in run.config}
    fields = flat({key: value for key, value in run.config.items() if key not in _NOT_COMPARED})
    facts["status"] = run.status
    log, problems = LogReader(run.path), list(run.problems)
    try:
        best = _best(run, log)
    except OSError as error:
        best = {}
        problems.append(f"cannot read {METRICS_FILE}: {error}")
    problem = "; ".join(filter(None, [*problems, log.broken.describe()]))
    row = Row(name, run.path, facts, {}, best, config=fields, problem=problem)
    if run.summary is None:
        return _with_log(row)
    summary = run.summary
    facts |= {key: value_text(summary[key]) for key in FACTS if key in summary and key != "status"}
    if isinstance(sets := summary.get("eval_sets"), list):
        facts["eval sets"] = plain(", ".join(map(str, sets)))
    last = {plain(str(key)): value for key, value in summary["final"].items()}
    return replace(
        row,
        last=last or _last_window(run.path),
        is_trained_only=not last,
        seconds=summary.get("seconds"),
        samples_per_second=summary.get("samples_per_second"),
        peak_memory_mib=summary.get(PEAK_MEMORY),
    )


def _with_log(row: Row) -> Row:
    """Return a row with what the last lines of its log say, for a run without a summary."""
    last: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    window: dict[str, Any] = {}
    speeds: list[float] = []
    for record in _last_records(row.path):
        last = record
        if record.get("phase") == EVAL:
            metrics = metrics_in(record)
        elif record.get("phase") == TRAIN:
            window = metrics_in(record)
            speed = number(record.get("samples_per_second"))
            speeds += [speed] if speed is not None and math.isfinite(speed) else []
    known = {"workers": value_text(last["workers"])} if "workers" in last else {}
    known["steps"] = value_text(last.get("step", 0))
    return replace(
        row,
        facts={**row.facts, **known},
        last=metrics or window,
        is_trained_only=not metrics,
        seconds=last.get("seconds"),
        samples_per_second=median(speeds) if speeds else None,
        peak_memory_mib=last.get(PEAK_MEMORY),
    )


def _best(run: StoredRun, log: LogReader) -> dict[str, Best]:
    """Return the best values of the metrics of all evaluations.

    Raises:
        OSError: If the log cannot be read.
    """
    best: dict[str, Best] = {}
    final = run.summary["final"] if run.summary else {}
    step = run.summary.get("steps") if run.summary else None
    evaluations = [(record.get("step"), metrics_in(record)) for record in log.records(EVAL)]
    if not evaluations:
        evaluations = [(step, {plain(str(name)): value for name, value in final.items()})]
    for at_step, metrics in evaluations:
        for name, value in metrics.items():
            found, known = number(value), best.get(name)
            if found is not None and goal_of(run.config, name).improves(found, known and known.value):
                best[name] = Best(found, at_step if isinstance(at_step, int) else None)
    return best


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


def _last_window(path: Path) -> dict[str, Any]:
    window: dict[str, Any] = {}
    for record in _last_records(path):
        window = metrics_in(record) if record.get("phase") == TRAIN else window
    return window


def _last_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last records of a run, without lines that are cut off or half written."""
    try:
        lines = read_tail(path / METRICS_FILE, _TAIL_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        if (record := parse_record(line)) is not None:
            yield record


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
