"""What commands that measure or search show, and what they write."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from hvdtrain.errors import EnvironmentFault, Interrupted
from hvdtrain.host.launcher import open_console, output_rank
from hvdtrain.storage.text import printable


def say(text: str) -> None:
    """Show what happens, on standard error."""
    click.echo(printable(text), err=True)


@contextmanager
def said_if_interrupted() -> Iterator[None]:
    """Return a context in which a measurement that a signal ends says on rank 0 that nothing is kept."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        if not output_rank():
            say("interrupted; nothing was written")
        raise


def show_found(
    text: str,
    document: dict[str, Any],
    json_path: Path | None,
    picture: Path | None = None,
    draw: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Show what was found, then write it: if it cannot be written, it is shown at least.

    Args:
        text: what is shown.
        document: the JSON document.
        json_path: the file for it, if one is wanted.
        picture: the file for a picture of it, if one is wanted.
        draw: draws the document into a file.

    Raises:
        EnvironmentFault: If a file cannot be written.
    """
    open_console().print(printable(text), highlight=False, markup=False, soft_wrap=True)
    write_json(json_path, document)
    if picture is not None and draw is not None:
        with _faults_of(picture):
            draw(document, picture)


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Write what was found, if a file for it is wanted.

    Raises:
        EnvironmentFault: If it cannot be written.
    """
    if path is not None:
        with _faults_of(path):
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written: {error.strerror or error}", "What was found is shown above."
        ) from None
