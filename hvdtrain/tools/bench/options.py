"""The options of the command ``bench``, beside those of a job."""

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from hvdtrain.config import Layer
from hvdtrain.config.options import ExpandedPath
from hvdtrain.errors import UsageError

Options = TypeVar("Options")  # a dataclass
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_LEAST_BYTES, _MOST_BYTES = 4 * 2**10, 4 * 2**30


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, such as 64K or 128M.

    Args:
        most: the largest, and in words.
    """

    name = "bytes"

    def __init__(self, most: int = _MOST_BYTES, in_words: str = "4G") -> None:
        self._most, self._in_words = most, in_words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip())
        size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
        if not _LEAST_BYTES <= size <= self._most or size % 4:
            self.fail(
                f"{value!r} is not a size from 4K to {self._in_words}, such as 64K or 128M.", param, ctx
            )
        return size


class Counts(click.ParamType):  # type: ignore[type-arg]
    """Numbers of workers, such as 1,2,4."""

    name = "counts"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers, the smallest first."""
        words = str(value).split(",")
        if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is not a list of numbers of workers, such as 1,2,4.", param, ctx)
        return tuple(sorted({int(word) for word in words}))


@dataclass(frozen=True)
class BenchOptions:
    """What the options of ``bench`` say, beside those of the job.

    Attributes:
        seconds: how long each measurement trains, roughly.
        split: whether the parts of a step are measured.
        all_reduce: whether sums are measured by size.
        max_bytes: the largest size; None for the default.
        sweep: the numbers of workers to launch; empty without a sweep.
        repeat: how often each number of workers is launched.
        hosts: hosts and slots for a sweep.
        controller: "mpi", "gloo" or None for what horovodrun chooses.
        json_path: file for the JSON document.
        picture: file for the picture.
    """

    seconds: float = 20.0
    split: bool = True
    all_reduce: bool = True
    max_bytes: int | None = None
    sweep: tuple[int, ...] = ()
    repeat: int | None = None
    hosts: str | None = None
    controller: str | None = None
    json_path: Path | None = None
    picture: Path | None = None

    def check(self) -> None:
        """Check what one option alone does not tell.

        Raises:
            UsageError: If options contradict each other.
        """
        for name, given in (
            ("--repeat", self.repeat),
            ("-H", self.hosts),
            ("--controller", self.controller),
        ):
            if given is not None and not self.sweep:
                raise UsageError(
                    f"{name} is for --sweep, which launches workers itself",
                    "To measure a job as it is launched: horovodrun -np 2 python -m hvdtrain bench ...",
                )
        if self.max_bytes is not None and (self.sweep or not self.all_reduce):
            raise UsageError(
                "--max-bytes is the largest all-reduce, and "
                f"{'--sweep' if self.sweep else '--no-all-reduce'} measures none",
                "Leave --max-bytes out.",
            )

    def check_files(self, layers: Sequence[Layer] = ()) -> None:
        """Check the files that rank 0 writes.

        Args:
            layers: the job's config values.

        Raises:
            UsageError: If one cannot be written.
        """
        check_writable(self.json_path, self.picture, read=config_files(layers))


def config_files(layers: Iterable[Layer]) -> list[Path]:
    """Return the config files of a job."""
    return [Path(layer.source) for layer in layers if layer.is_file]


def check_writable(*paths: Path | None, read: Iterable[Path] = ()) -> None:
    """Check that files can be written, and make the folders that they need.

    Args:
        paths: the files; None for one that is not asked for.
        read: files that the command reads and that must stay.

    Raises:
        UsageError: If one cannot, is named twice, or is one of those that must stay.
    """
    given = [path for path in paths if path is not None]
    kept = {path.resolve() for path in read}
    for number, path in enumerate(given):
        if path.resolve() in kept:
            raise UsageError(
                f"{path} is the config file of the job, which would be replaced", "Give another file's name."
            )
        if path.resolve() in [other.resolve() for other in given[:number]]:
            raise UsageError(f"{path} is named twice", "Give each of the files a name of its own.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{path}: the folder {path.parent} cannot be made: {error.strerror or error}",
                "Give a file in a folder of yours.",
            ) from None
        if os.path.isdir(path):  # names that are too long raise nothing here
            raise UsageError(f"{path} is a folder", "Give the name of a file.")
        try:
            _try_to_open(path.resolve())
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror or error}", "Give a file in a folder of yours."
            ) from None


def _try_to_open(path: Path) -> None:
    """Open a file for writing and leave it as it was. Pipes and devices are not opened: others may notice.

    Raises:
        OSError: If it cannot be opened.
    """
    if path.is_file():
        path.open("ab").close()
    elif not path.exists():
        path.open("xb").close()
        path.unlink()
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def bench_options(command: Any) -> Any:
    """Add the options of ``bench`` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_options(options: Mapping[str, Any], of: type[Options]) -> tuple[Options, dict[str, Any]]:
    """Return a command's own options, and the rest, which are fields of the job.

    Args:
        options: the values of all options; None for what is not given.
        of: the dataclass that has the own options.
    """
    names = {field.name for field in fields(of)}  # type: ignore[arg-type]
    own = {name: options[name] for name in names if options[name] is not None}
    return of(**own), {name: value for name, value in options.items() if name not in names}


_OPTIONS = (
    click.option("--seconds", type=click.FloatRange(0.1, 3600), default=20.0, metavar="SECONDS",
                 help="How long each measurement trains, roughly. [20]"),
    click.option("--split/--no-split", default=True,
                 help="Measure the parts of a step, for which a second model is built. [split]"),
    click.option("--all-reduce/--no-all-reduce", default=True,
                 help="Measure all-reduces from 4 KiB on. [all-reduce]"),
    click.option("--max-bytes", type=Bytes(), metavar="SIZE",
                 help="Largest all-reduce. [128M]"),
    click.option("--sweep", type=Counts(), metavar="1,2,4",
                 help="Launch these numbers of workers, and show how the speed grows."),
    click.option("--repeat", type=click.IntRange(1, 100), metavar="N",
                 help="How often --sweep launches each number of workers. [1]"),
    click.option("-H", "--hosts", metavar="HOSTS",
                 help="Hosts and slots for --sweep, such as host1:2,host2:2. [this host's cores]"),
    click.option("--controller", type=click.Choice(["mpi", "gloo"]),
                 help="Controller of the jobs that are launched. [horovodrun's choice]"),
    click.option("--json", "json_path", type=ExpandedPath(), metavar="FILE",
                 help="Write a JSON document, too."),
    click.option("--picture", type=ExpandedPath(), metavar="FILE",
                 help="Draw a picture, too: .png, .svg or .html; needs matplotlib."),
)  # fmt: skip
