"""The options of the commands ``bench`` and ``plan``, in addition to those of a job."""

import re
from dataclasses import dataclass
from pathlib import Path

import click

from hvdtrain.config.options import ExpandedPath
from hvdtrain.errors import UsageError
from hvdtrain.tools.output import all_of, parse_size
from hvdtrain.tools.spread import Spread

_SECONDS = 20.0
USUAL_LATENCY = Spread(50e-6, 20e-6, 100e-6)  # from program to program over TCP, in one data centre
_BITS, _LINK_SECONDS = {"k": 1e3, "m": 1e6, "g": 1e9}, {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s)?(?:/(\d+(?:\.\d+)?)\s*(us|ms|s))?", re.IGNORECASE)
_MOST_BITS, _MOST_LATENCY = 1e13, 10.0


@dataclass(frozen=True)
class Link:
    """The link of each host to the others, in each direction; seconds from program to program."""

    name: str
    bits_per_second: float
    latency: Spread = USUAL_LATENCY


def parse_link(text: str) -> Link:
    """Return the link that a text such as 10gbit or 1gbit/80us means."""
    found = _LINK.fullmatch(text.strip())
    bits = float(found[1]) * _BITS[found[2].lower()] if found else 0.0
    seconds = float(found[3]) * _LINK_SECONDS[found[4].lower()] if found and found[3] else None
    if not 0 < bits <= _MOST_BITS or (seconds is not None and not 0 < seconds <= _MOST_LATENCY):
        raise click.BadParameter(
            f"{text!r} is not a link such as 1gbit, or 10gbit/50us with its latency: the units are kbit, "
            f"mbit and gbit a second, and us, ms and s for a latency above 0, at most {_MOST_LATENCY:g} s."
        )
    latency = USUAL_LATENCY if seconds is None else Spread(seconds, seconds, seconds)
    return Link(text.strip().lower(), bits, latency)


USUAL_LINKS = tuple(map(parse_link, ("1gbit", "10gbit", "100gbit")))


def parse_links(text: str) -> tuple[Link, ...]:
    """Return links such as 1gbit,10gbit/50us, each once, in the order in which they are given."""
    return tuple(dict.fromkeys(map(parse_link, text.split(","))))


def parse_counts(text: str) -> tuple[int, ...]:
    """Return numbers of workers such as 1,2,4, the smallest first."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(f"{text!r} is not a list of numbers of workers, such as 1,2,4.")
    return tuple(sorted(set(map(int, words))))


@dataclass(frozen=True)
class BenchOptions:
    """What the options of ``bench`` say; None, or empty, for what is not given."""

    seconds: float = _SECONDS
    split: bool = True
    all_reduce: bool = True
    max_bytes: int | None = None
    sweep: tuple[int, ...] = ()
    hosts: str | None = None
    controller: str | None = None
    json_path: Path | None = None
    picture: Path | None = None

    def check(self) -> None:
        """Check that the options go together."""
        problem, remedy = "", "Leave --max-bytes out."
        for name, given in (
            ("-H", self.hosts),
            ("--controller", self.controller),
            ("--picture", self.picture),
        ):
            if given is not None and not self.sweep:
                problem = f"{name} is for --sweep, which launches workers itself"
                remedy = "To measure a job as it is launched: horovodrun -np 2 python -m hvdtrain bench ..."
        if self.max_bytes is not None and (self.sweep or not self.all_reduce):
            why = "--sweep" if self.sweep else "--no-all-reduce"
            problem = f"--max-bytes is the largest all-reduce, and {why} measures none"
        if problem:
            raise UsageError(problem, remedy, everywhere=True)  # every worker has the same command


@dataclass(frozen=True)
class PlanOptions:
    """What the options of ``plan`` say; None for what is not given."""

    hosts: int | None = None
    slots: int | None = None
    link: tuple[Link, ...] | None = None
    seconds: float = _SECONDS
    num_proc: int | None = None
    controller: str | None = None
    json_path: Path | None = None
    picture: Path | None = None


_CONTROLLER = click.Choice(["mpi", "gloo"])
_FILES = (
    click.option("--json", "json_path", type=ExpandedPath(), metavar="FILE",
                 help="Write a JSON document, too."),
    click.option("--picture", type=ExpandedPath(), metavar="FILE",
                 help="Draw speed against workers, too: .png, .svg or .html; needs matplotlib."),
)  # fmt: skip
bench_options = all_of(
    click.option("--seconds", type=click.FloatRange(0.1, 3600), default=_SECONDS, metavar="SECONDS",
                 help=f"How long each measurement trains, roughly. [{_SECONDS:g}]"),
    click.option("--split/--no-split", default=True,
                 help="Measure the parts of a step, for which a second model is built. [split]"),
    click.option("--all-reduce/--no-all-reduce", default=True,
                 help="Measure all-reduces from 4 KiB on. [all-reduce]"),
    click.option("--max-bytes", type=parse_size, metavar="SIZE",
                 help="Largest all-reduce. [128M]"),
    click.option("--sweep", type=parse_counts, metavar="1,2,4",
                 help="Launch these numbers of workers, and show how the speed grows."),
    click.option("-H", "--hosts", metavar="HOSTS",
                 help="Hosts and slots for --sweep, such as host1:2,host2:2. [this host's cores]"),
    click.option("--controller", type=_CONTROLLER,
                 help="Controller of the jobs that are launched. [horovodrun's choice]"),
    *_FILES,
)  # fmt: skip
plan_options = all_of(
    click.option("--hosts", type=click.IntRange(1, 4096), metavar="N",
                 help="Predict for up to N hosts. [as many as 64 workers need]"),
    click.option("--slots", type=click.IntRange(1, 128), metavar="N",
                 help="Workers of a host. [as many as were measured on one]"),
    click.option("--link", type=parse_links, metavar="LINKS",
                 help="Speeds of the hosts' links, such as 200mbit,10gbit, or 10gbit/50us with the latency. "
                      "[1gbit,10gbit,100gbit; measured on several hosts: their network]"),
    click.option("--seconds", type=click.FloatRange(0.1, 3600), default=_SECONDS, metavar="SECONDS",
                 help=f"How long each measurement trains, roughly. [{_SECONDS:g}]"),
    click.option("-np", "--num-proc", type=click.IntRange(2), metavar="N",
                 help="Workers of the jobs that are launched here. [this host's GPUs, or its cores]"),
    click.option("--controller", type=_CONTROLLER,
                 help="Controller of the jobs that are launched here. [each that Horovod was built with]"),
    *_FILES,
)  # fmt: skip
