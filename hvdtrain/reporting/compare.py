"""Runs side by side: a row for each, with its results and what differs in its config."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.errors import ConfigError, UsageError
from hvdtrain.printable import printable
from hvdtrain.regular_files import read_regular, read_tail
from hvdtrain.yaml_reader import parse_yaml

_MAX_BYTES = 10_000_000  # of summary.json and config.yaml
_MAX_SHOWN = 1000  # characters of a line
_TAIL_BYTES = 1_000_000  # of metrics.jsonl
# facts of a run: those that are equal in all runs are shown once, below the table, and the short ones of
# the others are columns
_FACTS = ("framework", "task", "status", "workers", "changes", "steps", "eval sets")
_COLUMNS = ("framework", "status")
# fields of the config that are not shown as differences: facts, and where a run starts from
_NOT_COMPARED = {"framework", "task", "epochs", "steps"}
_FILES = ("summary.json", "config.yaml", "metrics.jsonl")


@dataclass(frozen=True)
class _Run:
    """What the table shows of a run.

    Attributes:
        path: its directory.
        facts: values by the names in ``_FACTS``.
        metrics: metrics of the last evaluation, by name.
        speeds: "seconds" and "samples/s".
        config: fields of the config; those of mappings by names with dots.
        problem: why something is not shown; empty if all is.
    """

    path: Path
    facts: Mapping[str, str]
    metrics: Mapping[str, str]
    speeds: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def print_table(run_dirs: Iterable[Path]) -> None:
    """Print a table with a row per run.

    A run without a summary is shown as far as its log goes.

    Args:
        run_dirs: directories of runs.

    Raises:
        UsageError: If none of them holds a run.
    """
    paths = list(dict.fromkeys(run_dirs))
    runs = [_read(path) for path in paths if _holds_run(path)]
    others = [path for path in paths if not _holds_run(path)]
    if not runs:
        raise UsageError(
            f"{', '.join(map(str, others))}: no run (none of {', '.join(_FILES)})", "Name run directories."
        )
    names = _names(runs)
    console = Console()
    console.print(_table(names, runs))
    common = ", ".join(f"{name} {value}" for name, value in _common_facts(runs).items() if value)
    lines = [f"{'in all runs: ' if len(runs) > 1 else ''}{common}"] if common else []
    lines += _differences(names, runs)
    lines += [f"note: {name}: {run.problem}" for name, run in zip(names, runs, strict=True) if run.problem]
    lines += [f"note: {path}: left out, it holds no run" for path in others]
    for line in lines:
        console.print(Text(_plain(line)), soft_wrap=True)


def _table(names: Sequence[str], runs: Sequence[_Run]) -> Table:
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))[::-1]
    facts = [name for name in _COLUMNS if name not in _common_facts(runs)]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("run", overflow="fold")
    for name in [*metrics, "seconds", "samples/s"]:
        table.add_column(Text(_plain(name)), justify="right", overflow="fold")
    for name in facts:
        table.add_column(name, overflow="fold")
    for name, run in zip(names, runs, strict=True):
        cells = [name, *(run.metrics.get(metric, "") for metric in metrics)]
        cells += [run.speeds.get(speed, "") for speed in ("seconds", "samples/s")]
        cells += [run.facts.get(fact, "") for fact in facts]
        table.add_row(*(Text(cell) for cell in cells))  # a Text is not parsed as markup
    return table


def _differences(names: Sequence[str], runs: Sequence[_Run]) -> list[str]:
    """Return a line per run with the facts and config fields that differ and are no columns."""
    facts = [name for name in _FACTS if name not in _COLUMNS and name not in _common_facts(runs)]
    fields = _differing_fields(runs)
    if not facts and not fields:
        return []
    width = max(map(len, names))
    lines = ["what differs:"]
    for name, run in zip(names, runs, strict=True):
        parts = [f"{fact} {run.facts[fact]}" for fact in facts if run.facts.get(fact)]
        parts += [f"{key} {run.config[key] or 'null'}" for key in fields if key in run.config]
        lines.append(f"  {name:<{width}}  {', '.join(parts) or 'its config is unknown'}")
    return lines


def _names(runs: Sequence[_Run]) -> list[str]:
    """Return a name for each run: the last part of its path, or all of it if two have the same."""
    short = [_plain(run.path.resolve().name) for run in runs]
    return [
        name if short.count(name) == 1 else _plain(str(run.path))
        for name, run in zip(short, runs, strict=True)
    ]


def _common_facts(runs: Sequence[_Run]) -> dict[str, str]:
    return {name: runs[0].facts.get(name, "") for name in _FACTS if len(_values(runs, name)) == 1}


def _values(runs: Sequence[_Run], fact: str) -> set[str]:
    return {run.facts.get(fact, "") for run in runs}


def _differing_fields(runs: Sequence[_Run]) -> list[str]:
    """Return the config fields that are not equal in all runs whose config is known."""
    configs = [run.config for run in runs if run.config]
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({config.get(name) for config in configs}) > 1]


def _holds_run(path: Path) -> bool:
    return any((path / name).exists() for name in _FILES)


def _read(path: Path) -> _Run:
    """Read a run; what cannot be read is left out and said."""
    config, problem = _read_config(path / "config.yaml")
    from_config: dict[str, str] = {
        name: _value(config[name]) for name in ("framework", "task") if name in config
    }
    fields = _flat({name: value for name, value in config.items() if name not in _NOT_COMPARED})
    try:
        summary = json.loads(read_regular(path / "summary.json", _MAX_BYTES))
        if not isinstance(summary, dict) or not isinstance(summary.get("final"), dict):
            raise ValueError("it is not the summary of a run")
    except FileNotFoundError:
        return _from_log(path, from_config, fields, problem)
    except (OSError, ValueError, RecursionError) as error:
        return _from_log(path, from_config, fields, f"cannot read summary.json: {error}")
    facts = from_config | {name: _value(summary[name]) for name in _FACTS if name in summary}
    if isinstance(sets := summary.get("eval_sets"), list):
        facts["eval sets"] = _plain(", ".join(map(str, sets)))
    metrics = {name: _number(value, ".4f") for name, value in summary["final"].items()}
    speeds = {
        "seconds": _number(summary.get("seconds"), ".1f"),
        "samples/s": _number(summary.get("samples_per_second"), ",.0f"),
    }
    return _Run(path, facts, metrics, speeds, fields, problem)


def _from_log(path: Path, facts: Mapping[str, str], fields: Mapping[str, str], problem: str) -> _Run:
    """Return what is known of a run without a summary: its config and the last lines of metrics.jsonl."""
    last: dict[str, Any] = {}
    metrics: dict[str, str] = {}
    try:
        lines = read_tail(path / "metrics.jsonl", _TAIL_BYTES).splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):  # the first may be cut off, the last be half written
            continue
        if isinstance(values, dict):
            last = values
            if values.get("phase") == "eval":
                metrics = _metrics_in(values)
    status = {"status": "unfinished", "steps": _value(last.get("step", 0))}
    known = {"workers": _value(last["workers"])} if "workers" in last else {}
    speeds = {"seconds": _number(last.get("seconds"), ".1f")}
    return _Run(path, {**facts, **known, **status}, metrics, speeds, fields, problem)


def _metrics_in(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the metrics of a line of metrics.jsonl: they stand between the epoch and the learning rate."""
    names = list(values)
    first = names.index("epoch") + 1 if "epoch" in names else 0
    last = names.index("learning_rate") if "learning_rate" in names else first
    return {name: _number(values[name], ".4f") for name in names[first:last]}


def _read_config(path: Path) -> tuple[dict[str, Any], str]:
    """Return a config, and why it could not be read, if it is there and could not be."""
    try:
        values = parse_yaml(read_regular(path, _MAX_BYTES).decode(), "config.yaml")
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as error:
        return {}, f"cannot read config.yaml: {error}"
    except ConfigError as error:
        return {}, error.problem
    return (values, "") if isinstance(values, dict) else ({}, "config.yaml holds no fields")


def _flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of nested mappings as text, by names with dots."""
    result: dict[str, str] = {}
    for name, value in values.items():
        key = f"{prefix}{_plain(str(name))}"
        if isinstance(value, dict) and value:
            result |= _flat(value, f"{key}.")
        else:
            result[key] = _value(value)
    return result


def _number(value: Any, form: str) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return format(float(value), form) if is_number and abs(value) < 1e300 else _value(value)


def _value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return _plain(f"{value:,}")
    return "" if value is None else _plain(str(value))


def _plain(text: str) -> str:
    """Return text without what could control the terminal, shortened."""
    shown = printable(text[: _MAX_SHOWN + 1], lines=False)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
