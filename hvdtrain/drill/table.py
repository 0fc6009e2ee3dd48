"""Show what came of a drill: a table, and a JSON document."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.drill.cases import Outcome
from hvdtrain.printable import printable


def to_document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the outcomes as JSON-ready values."""
    return {
        "lost": sum(bool(outcome.lost) for outcome in outcomes),
        "cases": [asdict(outcome) for outcome in outcomes],
    }


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print a row per case, what was lost, and the conclusion."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("framework")
    table.add_column("case", min_width=20)
    for name in ("recovered in s", "steps", "samples", "last loss"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console.print(table)
    for outcome in outcomes:
        for text in outcome.lost:
            console.print(Text(f"{outcome.framework}, {outcome.case}: {printable(text)}"))
        if outcome.output:
            console.print(Text(printable(outcome.output)), style="dim")
    console.print(Text(_conclusion(outcomes)))


def _cells(outcome: Outcome) -> list[str | Text]:
    if outcome.not_tried:
        return [outcome.framework, outcome.case, "", "", "", "", Text(f"not tried: {outcome.not_tried}")]
    seconds = "" if outcome.recovery_seconds is None else f"{outcome.recovery_seconds:.1f}"
    loss = "" if outcome.loss is None else f"{outcome.loss:.6f}"
    result = Text("LOST", style="bold red") if outcome.lost else Text("nothing lost", style="green")
    numbers = [seconds, f"{outcome.steps:,}", f"{outcome.samples:,}", loss]
    return [outcome.framework, outcome.case, *numbers, result]


def _conclusion(outcomes: Sequence[Outcome]) -> str:
    lost = [outcome for outcome in outcomes if outcome.lost]
    left_out = sum(bool(outcome.not_tried) for outcome in outcomes)
    tried = len(outcomes) - left_out
    more = f"; {left_out} not tried" if left_out else ""
    if lost:
        return f"{len(lost)} of {tried} cases lost something{more}."
    return f"{tried} cases: no step and no sample was lost or done twice{more}."
