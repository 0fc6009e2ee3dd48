"""The options of the command ``plan``, beside those of a job."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvdtrain.config import Layer
from hvdtrain.config.options import ExpandedPath
from hvdtrain.errors import UsageError
from hvdtrain.tools.bench.options import check_writable, config_files
from hvdtrain.tools.bench.spread import Spread

# of 1538 bytes on the wire, 1448 are a message's; some interfaces and shapers count fewer of the others
PAYLOAD = Spread(0.95, 0.94, 0.96)
USUAL_LATENCY = Spread(50e-6, 20e-6, 100e-6)  # from program to program over TCP, in one data centre
# how many times as long the bytes take as the link needs for them: see benchmarks/README.md and docs/bench.md
SATURATION = {
    "Gloo": Spread(1.0, 1.0, 1.5),
    "MPI": Spread(1.4, 1.0, 1.9),
    "NCCL": Spread(1.0, 1.0, 1.7),  # not measured: between a ring that fills the link and the worst of MPI
}
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_LINK_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s)?(?:/(\d+(?:\.\d+)?)\s*(us|ms|s))?", re.IGNORECASE)
_MOST_BITS, _MOST_LATENCY = 1e13, 10.0


@dataclass(frozen=True)
class Link:
    """The link of each host to the others, in each direction.

    Attributes:
        name: as it was given.
        bits_per_second: what the wire carries.
        latency: seconds from the sending program to the receiving one, for a small message.
    """

    name: str
    bits_per_second: float
    latency: Spread = USUAL_LATENCY

    def seconds_for(self, size: float, transport: str) -> Spread:
        """Return how long a host needs to send and receive so many bytes.

        Args:
            size: bytes in each direction.
            transport: "MPI", "Gloo" or "NCCL", which do not use a link equally well.
        """
        wire = 8 * size / self.bits_per_second
        factor = SATURATION[transport]
        return Spread(
            wire * factor.median / PAYLOAD.median,
            wire * factor.low / PAYLOAD.high,
            wire * factor.high / PAYLOAD.low,
        )


def parse_link(text: str) -> Link:
    """Return the link that a text such as 10gbit or 1gbit/80us means.

    Raises:
        ValueError: If it means none.
    """
    found = _LINK.fullmatch(text.strip())
    bits = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
    seconds = float(found[3]) * _LINK_SECONDS[found[4].lower()] if found and found[3] else None
    if not 0 < bits <= _MOST_BITS or (seconds is not None and not 0 < seconds <= _MOST_LATENCY):
        raise ValueError(
            f"{text!r} is not a link such as 1gbit, or 10gbit/50us with its latency: the units are kbit, "
            f"mbit and gbit a second, and us, ms and s for a latency above 0, at most {_MOST_LATENCY:g} s"
        )
    latency = USUAL_LATENCY if seconds is None else Spread(seconds, seconds, seconds)
    return Link(text.strip().lower(), bits, latency)


class Links(click.ParamType):  # type: ignore[type-arg]
    """Links, such as 1gbit,10gbit/50us."""

    name = "links"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Link, ...]:
        """Return the links, each once, in the order in which they are given."""
        if not isinstance(value, str):
            return tuple(value)
        try:
            return tuple(dict.fromkeys(parse_link(text) for text in value.split(",")))
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


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
