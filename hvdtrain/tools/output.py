"""What the commands of tools share: whether a tool is installed, options, what they show and write."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault, Interrupted, UsageError
from hvdtrain.host.launcher import open_console, output_rank
from hvdtrain.storage.text import printable

Options = TypeVar("Options")  # a dataclass
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_LEAST_BYTES, _MOST_BYTES = 4 * 2**10, 4 * 2**30


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
    """Show what was found, then write it: if it cannot be written, it is shown at least."""
    open_console().print(printable(text), highlight=False, markup=False, soft_wrap=True)
    write_json(json_path, document)
    if picture is not None and draw is not None:
        with _faults_of(picture):
            draw(document, picture)


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Write what was found, if a file for it is wanted."""
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


def all_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what adds options to a command, in this order."""
    return lambda command: reduce(lambda found, option: option(found), reversed(options), command)


def parse_size(text: str, most: int = _MOST_BYTES, as_text: str = "4G") -> int:
    """Return a number of bytes such as 64K or 128M, at most so many, which are also given as a text."""
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not _LEAST_BYTES <= size <= most or size % 4:
        raise click.BadParameter(f"{text!r} is not a size from 4K to {as_text}, such as 64K or 128M.")
    return size


def check_writable(*paths: Path | None, layers: Iterable[Layer] = ()) -> None:
    """Check that files can be written and are no config files; make the folders that they need."""
    given = [path for path in paths if path is not None]
    kept = {Path(layer.source).resolve() for layer in layers if layer.is_file}
    for number, path in enumerate(given):
        if path.resolve() in kept:
            raise UsageError(
                f"{path} is the config file of the job, which would be replaced", "Give another file's name."
            )
        if path.resolve() in [other.resolve() for other in given[:number]]:
            raise UsageError(f"{path} is named twice", "Give each of the files a name of its own.")
        try:
            if not path.parent.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
            target = path.resolve()
            if not target.exists():
                target.open("xb").close()
                target.unlink()
            elif target.is_file() or target.is_dir():  # a pipe or a device is left alone: others may notice
                target.open("ab").close()
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror or error}", "Give a file in a folder of yours."
            ) from None


def take_options(options: Mapping[str, Any], of: type[Options]) -> tuple[Options, dict[str, Any]]:
    """Return a command's own options, and the rest, which are fields of the job."""
    names = {field.name for field in fields(of)}  # type: ignore[arg-type]
    own = {name: options[name] for name in names if options[name] is not None}
    return of(**own), {name: value for name, value in options.items() if name not in names}


# commands of a folder next to this file; an installation may lack any of these folders
_FOLDERS = {
    "bench": "bench", "plan": "bench", "lr-find": "search", "batch-find": "search", "parity": "parity",
    "prove": "parity", "report": "report", "watch": "report", "doctor": "doctor", "drill": "drill",
}  # fmt: skip


def installed(command: click.Command) -> click.Command:
    """Return a command of the command line; in place of one whose tool is not installed, one that says so."""
    name = str(command.name)
    tool = _FOLDERS.get(name)
    if tool is None or Path(__file__).with_name(tool).joinpath("__init__.py").is_file():
        return command

    def refuse(words: tuple[str, ...]) -> None:
        raise UsageError(
            f"{name} needs hvdtrain.tools.{tool}, which this installation of hvdtrain does not have",
            "Install hvdtrain anew.",
        )

    words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
    return click.Command(name, {"ignore_unknown_options": True}, refuse, [words], hidden=True)


def options_of(module: str, name: str) -> Callable[[Any], Any]:
    """Return what adds the options of a tool to its command; what adds none if the tool is not installed."""
    try:
        return cast(Callable[[Any], Any], getattr(import_module(f"hvdtrain.tools.{module}"), name))
    except ModuleNotFoundError:
        return lambda command: command
