"""Showing what a search found, and writing it to files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hvdtrain.bench.picture import new_figure, save_figure
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.launcher import open_console
from hvdtrain.printable import printable

Draw = Callable[[Any, dict[str, Any]], None]


def say(text: str) -> None:
    """Show what is going on, on standard error."""
    click.echo(printable(text), err=True)


def tell(
    text: str,
    document: dict[str, Any],
    json_path: Path | None = None,
    picture: Path | None = None,
    draw: Draw | None = None,
) -> None:
    """Show what was found, then write it: what cannot be written is shown at least.

    Args:
        text: what is shown.
        document: the JSON document.
        json_path: the file for it.
        picture: the file for a picture.
        draw: draws the document.

    Raises:
        EnvironmentFault: If a file cannot be written.
    """
    open_console().print(printable(text), highlight=False, markup=False, soft_wrap=True)
    if json_path is not None:
        write_text(json_path, json.dumps(document, indent=2) + "\n")
    if picture is not None and draw is not None:
        figure = new_figure()
        draw(figure, document)
        try:
            save_figure(figure, picture)
        except OSError as error:
            raise _unwritten(picture, error) from None


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        EnvironmentFault: If it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritten(path, error) from None


def _unwritten(path: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"{path} cannot be written: {error.strerror or error}", "What was found stands above."
    )
