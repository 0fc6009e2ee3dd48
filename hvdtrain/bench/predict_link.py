"""Links between hosts: how many bits a second, and how long a message takes that has none."""

import re
from dataclasses import dataclass
from typing import Any

import click

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
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
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
    seconds = float(found[3]) * _SECONDS[found[4].lower()] if found and found[3] else None
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
