"""The history of a run, from metrics.jsonl, for those who train from Python."""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.callbacks import Best
from hvdtrain.config import Config
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.metric_names import LINE_FIELDS, MEASURES
from hvdtrain.reporting.jsonl import lines_of
from hvdtrain.reporting.records import EVAL, KEPT, key_of, line_of, parse_lines

# numbers of an evaluation that are no metrics
_NO_METRICS = LINE_FIELDS | MEASURES
_TAIL_LINES = 4 * KEPT  # among which the last records of a run are


def read_lines(path: Path, recent: Iterable[Mapping[str, Any]] = ()) -> NDArray[np.uint8]:
    """Return the lines of a metrics.jsonl, as bytes to send to other workers.

    Args:
        path: the file. A line of it that cannot be read is left out.
        recent: the last records of the run; those that the file lacks, on a full disk, are appended.
    """
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        lines.extend(line for line in lines_of(path) if parse_lines([line]))
    tail = parse_lines(lines[-_TAIL_LINES:])
    known = {key_of(record) for record in tail}
    first = tail[0]["step"] if tail and len(lines) > _TAIL_LINES else 0
    lacking = [record for record in recent if key_of(record) not in known and record["step"] >= first]
    lines += [line_of(record) for record in lacking]
    return np.frombuffer(b"".join(line if line.endswith(b"\n") else line + b"\n" for line in lines), np.uint8)


def best_of(lines: Iterable[bytes], config: Config, checkpoints: Mapping[int, str]) -> dict[str, Best]:
    """Return the best value of each evaluation metric.

    Args:
        lines: those of metrics.jsonl.
        config: its config, which may say of a metric which end is better.
        checkpoints: where those are that the run directory has, by step.
    """
    goals = {goal.metric: goal for goal in _goals(config)}
    found: dict[str, Best] = {}
    for record in parse_lines(line for line in lines if b'"eval"' in line):
        if record.get("phase") != EVAL:
            continue
        for name, value in record.items():
            if name in _NO_METRICS or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            goal = goals.setdefault(name, MetricGoal.parse(name))
            if goal.improves(value, found[name].value if name in found else None):
                found[name] = Best(value, record["step"], checkpoints.get(record["step"]))
    return found


def _goals(config: Config) -> list[MetricGoal]:
    """Return the goals of the config, the one that counts last."""
    named = (config.plateau_goal, config.early_stopping, config.keep_best)
    return [goal for goal in named if goal is not None]
