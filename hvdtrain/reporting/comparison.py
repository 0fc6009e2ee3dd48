"""What is compared of runs: facts, results and config fields, a row for each run."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hvdtrain.callbacks import EVAL, TRAIN
from hvdtrain.early_stopping import PEAK_MEMORY, MetricGoal
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.reporting.stored_runs import (
    StoredRun,
    describe_broken,
    flat,
    metrics_in,
    number,
    plain,
    read_records,
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
    broken, problems = list[int](), list(run.problems)
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
