"""What a sweep found: a table of its trials, the best one, what mattered; CSV and JSON."""

import csv
import io
import shlex
from dataclasses import dataclass
from typing import Any

from optuna.trial import TrialState

from hvdtrain.search.space import Dimension
from hvdtrain.search.study import SweepStudy
from hvdtrain.search.sweep_plan import SweepPlan
from hvdtrain.search.trial_run import run_directory

VERSION = 1
_STATES = {
    TrialState.COMPLETE: "completed",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "unfinished",
}


@dataclass(frozen=True)
class Row:
    """A trial.

    Attributes:
        number: its number, from 0.
        state: "completed", "pruned", "failed" or "unfinished".
        value: the metric at its last evaluation; None if there was none.
        values: the fields that were searched.
        steps: steps trained; None if it is not known.
        seconds: time trained.
        evaluations: the metric after each evaluation that the study knows, by their count.
        reason: why it was pruned or failed.
    """

    number: int
    state: str
    value: float | None
    values: dict[str, Any]
    steps: int | None
    seconds: float | None
    evaluations: dict[int, float]
    reason: str


@dataclass(frozen=True)
class SweepTable:
    """The trials of a sweep.

    Attributes:
        plan: what the sweep does.
        rows: the trials, the best first, then those that were pruned, failed, or did not end.
        importance: how much each field mattered, the most important first.
    """

    plan: SweepPlan
    rows: list[Row]
    importance: dict[str, float]

    @classmethod
    def of(cls, plan: SweepPlan, study: SweepStudy) -> "SweepTable":
        """Return the trials of a study."""
        rows = [_row(trial, plan.space) for trial in study.trials]
        order = list(_STATES.values())
        sign = -1 if plan.goal.highest else 1
        rows.sort(key=lambda row: (order.index(row.state), sign * (row.value or 0.0), row.number))
        return cls(plan, rows, study.importance())

    @property
    def best(self) -> Row | None:
        """The best trial of those that ran to their end."""
        return self.rows[0] if self.rows and self.rows[0].state == "completed" else None

    @property
    def command(self) -> str:
        """The command that repeats the best trial; empty if there is none."""
        if self.best is None:
            return ""
        plan = self.plan
        words = []
        if plan.workers > 1:
            controller = [f"--{plan.controller}"] if plan.controller else []
            words = ["horovodrun", *controller, "-np", str(plan.workers)]
        path = run_directory(plan.folder, self.best.number) / "config.yaml"
        return " ".join([*words, "python -m hvdtrain", shlex.quote(str(path))])

    def describe(self) -> str:
        """Return it as the text that is shown."""
        metric = self.plan.goal.metric
        names = [one.name for one in self.plan.space]
        cells = [["trial", "state", metric, *names, "steps", "seconds"]]
        for row in self.rows:
            values = [_shown(row.values.get(name)) for name in names]
            cells.append([str(row.number), row.state, _shown(row.value), *values, _shown(row.steps),
                          _shown(row.seconds)])  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
        ]
        for at, row in enumerate(self.rows, start=1):
            lines[at] += f"  {row.reason}" if row.reason else ""
        if self.importance:
            shares = ", ".join(f"{name} {share:.2f}" for name, share in self.importance.items())
            lines.append(f"importance: {shares}")
        if self.best is None:
            return "\n".join([*lines, "no trial ran to its end"])
        lines.append(f"best: trial {self.best.number}, {metric} {_shown(self.best.value)}; to repeat it:")
        return "\n".join([*lines, f"  {self.command}"])

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document."""
        plan = self.plan
        return {
            "version": VERSION,
            "folder": str(plan.folder),
            "metric": plan.goal.metric,
            "direction": "max" if plan.goal.highest else "min",
            "sampler": plan.sampler,
            "pruner": plan.pruner,
            "workers": plan.workers,
            "best": None if self.best is None else self.best.number,
            "command": self.command,
            "importance": self.importance,
            "trials": [
                {
                    "number": row.number,
                    "state": row.state,
                    "value": row.value,
                    "values": row.values,
                    "steps": row.steps,
                    "seconds": row.seconds,
                    "evaluations": row.evaluations,
                    "reason": row.reason,
                    "run_dir": str(run_directory(plan.folder, row.number)),
                }
                for row in self.rows
            ],
        }

    def to_csv(self) -> str:
        """Return the trials as CSV."""
        text = io.StringIO()
        names = [one.name for one in self.plan.space]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["trial", "state", self.plan.goal.metric, *names, "steps", "seconds", "reason"])
        for row in self.rows:
            values = [row.values.get(name) for name in names]
            writer.writerow([row.number, row.state, row.value, *values, row.steps, row.seconds, row.reason])
        return text.getvalue()


def _row(trial: Any, space: list[Dimension]) -> Row:
    notes = trial.user_attrs
    values = {one.name: one.value(trial.params[one.name]) for one in space if one.name in trial.params}
    value = trial.value if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) else None
    return Row(
        trial.number,
        _STATES[trial.state],
        value,
        values,
        notes.get("steps"),
        notes.get("seconds"),
        dict(sorted(trial.intermediate_values.items())),
        notes.get("reason", ""),
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
