"""Finished runs side by side."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hvdtrain.errors import UsageError

# what the table reads of a summary
_NEEDED = (
    "framework", "final", "seconds", "samples_per_second", "steps", "workers", "status", "task",
)  # fmt: skip


def print_table(run_dirs: Iterable[Path]) -> None:
    """Print a table with a column per run.

    Args:
        run_dirs: run directories that hold a summary.json.

    Raises:
        UsageError: If one holds none, or it cannot be read.
    """
    summaries = [_read(path) for path in run_dirs]
    table = Table()
    table.add_column("")
    for summary in summaries:
        table.add_column(f"{summary['framework']}", justify="right", overflow="fold")
    names = list(dict.fromkeys(name for summary in summaries for name in summary["final"]))
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        (name, partial(_metric, name)) for name in reversed(names)
    ]
    rows += [
        ("seconds", lambda s: f"{s['seconds']:.1f}"),
        ("samples/s", lambda s: f"{s['samples_per_second']:,.0f}"),
        ("steps", lambda s: f"{s['steps']:,}"),
        ("workers", lambda s: str(s["workers"])),
        ("status", lambda s: s["status"]),
        ("task", lambda s: s["task"]),
    ]
    for name, cell in rows:
        table.add_row(name, *(cell(summary) for summary in summaries))
    Console().print(table)


def _read(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{run_dir} holds no summary.json", "Name the directory of a run that has ended."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    missing = [name for name in _NEEDED if not isinstance(summary, dict) or name not in summary]
    if missing:
        raise UsageError(f"cannot read {path}: it has no {missing[0]!r}; is it the summary of a run?")
    return summary


def _metric(name: str, summary: dict[str, Any]) -> str:
    return f"{summary['final'][name]:.4f}" if name in summary["final"] else ""
