"""The options of the command ``plan``, beside those of a job."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvdtrain.bench.predict_link import Link, Links, parse_link
from hvdtrain.config import Layer
from hvdtrain.config.options import ExpandedPath
from hvdtrain.errors import UsageError
from hvdtrain.tools.bench.options import check_writable, config_files

_SECONDS = 20.0
USUAL_LINKS = tuple(map(parse_link, ("1gbit", "10gbit", "100gbit")))


@dataclass(frozen=True)
class PlanOptions:
    """What the options of ``plan`` say, beside those of the job.

    Attributes:
        hosts: the largest number of hosts; None for 64 workers.
        slots: workers of a host; None for as many as were measured.
        link: the links to predict for; None for the usual ones, or for the network that was measured.
        seconds: how long each measurement trains, roughly; None for the default.
        source: the JSON document of an earlier plan, whose measurements are taken.
        num_proc: the workers of the jobs that are launched here.
        controller: "mpi", "gloo" or None for each that there is.
        json_path: file for the JSON document.
        picture: file for the picture.
    """

    hosts: int | None = None
    slots: int | None = None
    link: tuple[Link, ...] | None = None
    seconds: float | None = None
    source: Path | None = None
    num_proc: int | None = None
    controller: str | None = None
    json_path: Path | None = None
    picture: Path | None = None

    @property
    def train_seconds(self) -> float:
        """How long each measurement trains, roughly."""
        return _SECONDS if self.seconds is None else self.seconds

    def check(self, *, launched: bool) -> None:
        """Check that options go together.

        Args:
            launched: whether a launcher started this process.

        Raises:
            UsageError: If options contradict each other.
        """
        if self.source is not None and (launched or self.seconds is not None):
            given = "a launcher has started this process" if launched else "--seconds is how long to measure"
            raise UsageError(
                f"--from {self.source} measures nothing, but {given}",
                "Run it without both, or measure again without --from.",
                everywhere=True,
            )
        for name, value in (("-np", self.num_proc), ("--controller", self.controller)):
            if value is not None and (launched or self.source is not None):
                raise UsageError(
                    f"{name} is for jobs that plan launches itself",
                    "Give it to the launcher, or run plan without a launcher and without --from.",
                    everywhere=True,
                )

    def check_files(self, layers: Sequence[Layer] = ()) -> None:
        """Check the files that are written.

        Args:
            layers: the job's config values.

        Raises:
            UsageError: If one cannot be written.
        """
        read = [*config_files(layers), *([self.source] if self.source else [])]
        check_writable(self.json_path, self.picture, read=read)


def plan_options(command: Any) -> Any:
    """Add the options of ``plan`` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option("--hosts", type=click.IntRange(1, 4096), metavar="N",
                 help="Predict for up to N hosts. [as many as 64 workers need]"),
    click.option("--slots", type=click.IntRange(1, 128), metavar="N",
                 help="Workers of a host. [as many as were measured on one]"),
    click.option("--link", type=Links(), metavar="LINKS",
                 help="Speeds of the hosts' links, such as 200mbit,10gbit, or 10gbit/50us with the latency. "
                      "[1gbit,10gbit,100gbit; measured on several hosts: their network]"),
    click.option("--seconds", type=click.FloatRange(0.1, 3600), metavar="SECONDS",
                 help=f"How long each measurement trains, roughly. [{_SECONDS:g}]"),
    click.option("--from", "source", type=ExpandedPath(), metavar="FILE",
                 help="Measure nothing: take the measurements that an earlier plan wrote with --json."),
    click.option("-np", "--num-proc", type=click.IntRange(2), metavar="N",
                 help="Workers of the jobs that are launched here. [this host's GPUs, or its cores]"),
    click.option("--controller", type=click.Choice(["mpi", "gloo"]),
                 help="Controller of the jobs that are launched here. [each that Horovod was built with]"),
    click.option("--json", "json_path", type=ExpandedPath(), metavar="FILE",
                 help="Write a JSON document, too."),
    click.option("--picture", type=ExpandedPath(), metavar="FILE",
                 help="Draw a picture, too: .png, .svg or .html; needs matplotlib."),
)  # fmt: skip
