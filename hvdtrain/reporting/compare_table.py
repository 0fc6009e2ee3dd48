"""The table of ``compare``: it fits the terminal without cutting how a run stands or what a column is."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

RUN = "run"
_HEAD_WIDTH = 12  # characters of a line of a column's title
_CELL_WIDTH = 16
_NAME_WIDTH = 16  # to which names of runs are wrapped before columns go into another table
_VALUE_WIDTH = 48  # of a config field that differs
_PARTS = re.compile(r"[^/_ ]*[/_ ]?")


def tables_of(rows: Sequence[Mapping[str, str]], facts: Sequence[str], width: int) -> list[Table]:
    """Return tables with all columns, as many to a table as have room.

    Names of runs are wrapped. Each table has the facts.

    Args:
        rows: cells by column; all rows have the same columns.
        facts: the columns that each table has.
        width: characters of a line.
    """
    columns = [name for name in rows[0] if name != RUN and name not in facts]
    groups: list[list[str]] = [[]]
    for name in columns:
        if groups[-1] and _least_width(rows, [*groups[-1], name, *facts]) > width:
            groups.append([])
        groups[-1].append(name)
    return [_table(rows, [*group, *facts], facts) for group in groups]


def _least_width(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> int:
    """Return how wide a table of columns is with the names of runs wrapped."""
    short = [{**row, RUN: row[RUN][:_NAME_WIDTH]} for row in rows]
    unlimited = Console(width=10_000)
    return unlimited.measure(_table(short, columns, ())).maximum


def _table(rows: Sequence[Mapping[str, str]], columns: Sequence[str], facts: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column(RUN, overflow="fold")
    for name in columns:
        side: Literal["left", "right"] = "left" if name in facts else "right"
        title = Text("\n".join(title_lines(name)), justify=side)  # a Text is not parsed as markup
        table.add_column(title, justify=side, no_wrap=True, overflow="ellipsis", max_width=_CELL_WIDTH)
    for row in rows:
        table.add_row(Text(row[RUN]), *(Text(row[name]) for name in columns))
    return table


def title_lines(name: str) -> list[str]:
    """Return a column's title in lines, broken after spaces, slashes and underscores if need be."""
    lines = [""]
    for part in _PARTS.findall(name):
        if len((lines[-1] + part).rstrip()) > _HEAD_WIDTH and lines[-1]:
            lines.append("")
        lines[-1] += part
    pieces = [textwrap.wrap(line, _HEAD_WIDTH) or [""] for line in lines]
    return [piece for line in pieces for piece in line]


def shortened(value: str) -> str:
    """Return a value with its middle left out if it is long; ``--csv`` has all of it."""
    if len(value) <= _VALUE_WIDTH:
        return value
    half = (_VALUE_WIDTH - 3) // 2
    return f"{value[:half]}...{value[-half:]}"


def paragraph(head: str, text: str, width: int, indent: int) -> list[str]:
    """Return a text after a head in lines, all but the first of which are indented."""
    wrapped = textwrap.wrap(text, max(20, width - indent), break_on_hyphens=False) or [""]
    if len(head) > indent:
        return [head.rstrip(), *(" " * indent + line for line in wrapped)]
    return [f"{head:<{indent}}{wrapped[0]}", *(" " * indent + line for line in wrapped[1:])]
