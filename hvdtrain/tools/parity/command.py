"""The command ``parity``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.config import Layer
from hvdtrain.errors import EXIT_DONE, EXIT_TRAINING, HvdtrainError
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs.opening.start import check_may_be_elastic
from hvdtrain.storage.text import counted, printable
from hvdtrain.tools.output import check_writable, config_files, said_if_interrupted, write_json
from hvdtrain.tools.parity.job import Result, parity_job
from hvdtrain.tools.parity.observation import Difference
from hvdtrain.tools.parity.rows import Row
from hvdtrain.tools.parity.side import Role, find_role
from hvdtrain.tools.parity.steps import worst
from hvdtrain.tools.parity.verdict import Comparison, Verdict

_KIND_WIDTH = 30


def show(result: Result, console: Console) -> None:
    """Print what was found."""
    verdict = result.verdict
    if verdict is None:
        console.print(_unmatched_table(result))
        _line(console, "parity: not compared, the models do not have the same parameters (see above)")
        if result.match.remedy:
            _line(console, result.match.remedy)
        return
    console.print(_layer_table(verdict))
    console.print(_step_table(verdict))
    for note in [*result.notes, *verdict.notes]:
        _line(console, f"note: {note}")
    for line in conclusion(verdict):
        _line(console, line)


def conclusion(verdict: Verdict) -> list[str]:
    """Return what was found, in sentences."""
    if verdict.has_parity:
        if verdict.fp64 is None:
            return ["parity: the models agree within the rounding of their precision"]
        largest = max((apart.relative for apart in _all(verdict.fp64.rows)), default=0.0)
        usual = max((apart.relative for apart in _all(verdict.usual.rows)), default=0.0)
        return [
            f"parity: the models compute the same; outputs differ by {usual:.1e}, in fp64 by {largest:.1e}: "
            "this is rounding"
        ]
    lines = []
    if verdict.divergence:
        lines.append(f"first difference: {verdict.divergence}")
        if verdict.fp64 is not None:
            lines.append("it remains in fp64: this is no rounding")
    lines += [f"cause: {one.layer}: {one.suspect}: {one.text}" for one in verdict.findings]
    found = len(verdict.findings)
    lines.append(f"no parity: {counted(found, 'cause')} found")
    if found:  # what differs first hides what differs behind it
        mended = "it is mended" if found == 1 else "these are mended"
        lines.append(f"further causes may show when {mended}: run parity again then")
    return lines


def to_document(result: Result) -> dict[str, Any]:
    """Return what was found as JSON has it."""
    verdict = result.verdict
    document: dict[str, Any] = {
        "task": result.task,
        "workers_of_each": result.workers,
        "parity": result.has_parity,
        "unmatched": [
            {"name": one.name, "torch": one.left, "tf": one.right} for one in result.match.unmatched
        ],
        "notes": [*result.notes],
    }
    if verdict is not None:
        document["notes"] += verdict.notes
        document |= {
            "first_difference": verdict.divergence,
            "findings": [
                {"suspect": one.suspect, "layer": one.layer, "text": one.text} for one in verdict.findings
            ],
            "layers": _layers_of(verdict.usual),
            "steps": _steps_of(verdict.usual),
            "fp64": None
            if verdict.fp64 is None
            else {"layers": _layers_of(verdict.fp64), "steps": _steps_of(verdict.fp64)},
        }
    return document


def _layers_of(found: Comparison) -> list[dict[str, Any]]:
    return [
        {
            "layer": row.path,
            "torch": row.left.kind,
            "tf": row.right.kind,
            "inputs": _numbers(row.inputs),
            "outputs": _numbers(row.outputs),
        }
        for row in found.rows
    ]


def _steps_of(found: Comparison) -> list[dict[str, Any]]:
    return [
        {
            "step": row.step,
            "loss": _numbers(row.loss),
            "gradients": {name: _numbers(one) for name, one in row.gradients.items()},
            "parameters": {name: _numbers(one) for name, one in row.parameters.items()},
        }
        for row in found.steps
    ]


def _numbers(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    # JSON has no infinity: such a difference is a text
    return {
        name: value if value < float("inf") else "infinite"
        for name, value in (("absolute", found.absolute), ("relative", found.relative))
    }


def _layer_table(verdict: Verdict) -> Table:
    table = _table("layer", "PyTorch / TensorFlow")
    for name in ("inputs, relative", "outputs, relative", "absolute", "in fp64, relative"):
        table.add_column(name, justify="right", overflow="fold")
    wide = {} if verdict.fp64 is None else {row.path: row for row in verdict.fp64.rows}
    for row in verdict.usual.rows:
        kinds = row.left.kind if row.left.kind == row.right.kind else f"{row.left.kind} / {row.right.kind}"
        table.add_row(
            *_texts(
                row.path,
                kinds[:_KIND_WIDTH],
                _relative(row.inputs),
                "other shape" if row.has_other_shape else _relative(row.outputs),
                "" if row.outputs is None else f"{row.outputs.absolute:.1e}",
                _relative(wide[row.path].outputs) if row.path in wide else "",
            )
        )
    return table


def _step_table(verdict: Verdict) -> Table:
    table = _table("after")
    for name in ("loss", "gradients", "parameters"):
        table.add_column(f"{name}, relative", justify="right", overflow="fold")
        table.add_column("in fp64", justify="right")
    table.add_column("furthest apart", overflow="fold")
    wide = {} if verdict.fp64 is None else {row.step: row for row in verdict.fp64.steps}
    for row in verdict.usual.steps:
        other = wide.get(row.step)
        cells = [f"{row.step:,} step{'s' if row.step > 1 else ''}"]
        for name in ("loss", "gradients", "parameters"):
            for one in (row, other):
                found = None if one is None else getattr(one, name)
                cells.append(_relative(worst(found)[1] if isinstance(found, dict) else found))
        name = worst((other or row).parameters)[0] or worst((other or row).gradients)[0]
        table.add_row(*_texts(*cells, name.removeprefix("model/")))
    return table


def _unmatched_table(result: Result) -> Table:
    table = _table("parameter", "PyTorch", "TensorFlow")
    for one in result.match.unmatched:
        shapes = ["missing" if shape is None else str(shape) for shape in (one.left, one.right)]
        table.add_row(*_texts(one.name, *shapes))
    return table


def _table(*names: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _texts(*cells: str) -> list[Text]:
    return [Text(printable(cell)) for cell in cells]  # a Text is not parsed as markup


def _relative(found: Difference | None) -> str:
    return "" if found is None else f"{found.relative:.1e}"


def _all(rows: Sequence[Row]) -> list[Difference]:
    return [found for row in rows for found in (row.outputs,) if found is not None]


def _line(console: Console, text: str) -> None:
    console.print(Text(printable(text)), soft_wrap=True)


def run_parity(layers: list[Layer], json_path: Path | None) -> int:
    """Compare a task's two models, show what was found, and return the exit code: 4 on rank 0 without parity.

    Other ranks end well, so that no launcher ends rank 0 while it shows what was found.

    Args:
        layers: the job's config values, weakest source first.
        json_path: file for the JSON document, if one is wanted.

    Raises:
        UsageError: If no launcher started an even number of processes over MPI.
        HvdtrainError: as training would raise it.
    """
    check_may_be_elastic(None)
    role = find_role()
    if role.rank == 0:
        check_writable(json_path, read=config_files(layers))
    with said_if_interrupted():
        found = _compared(layers, role)
    if isinstance(found, Result):
        show(found, open_console())
        write_json(json_path, to_document(found))
        return EXIT_DONE if found.has_parity else EXIT_TRAINING
    return EXIT_DONE


def _compared(layers: list[Layer], role: Role) -> Result | bool:
    try:
        return parity_job(layers, role)
    except HvdtrainError as error:
        # rank 0 does not report what TensorFlow's workers alone raise; their leader does
        error.everywhere &= not role.is_leader or role.rank == 0
        raise
