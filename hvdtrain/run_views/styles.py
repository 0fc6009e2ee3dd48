"""How runs are told apart without colours: each has a colour, dashes and markers of its own."""

from typing import NamedTuple

# of Okabe and Ito, which colour-blind people tell apart; without yellow, which is too light on white
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_DASHES = ((), (8, 4), (2, 3), (9, 3, 2, 3), (14, 4))
# the library's names, and characters that look the same
_MARKERS = (
    ("circle", "●"), ("square", "■"), ("triangle", "▲"), ("diamond", "◆"), ("inverted_triangle", "▼"),
    ("x", "✕"), ("star", "★"), ("cross", "✚"),
)  # fmt: skip


class Style(NamedTuple):
    """How a run's curves look.

    Attributes:
        colour: in hexadecimal.
        dashes: lengths of dashes and gaps in pixels; empty for a solid line.
        marker: the library's name of the marker.
        sign: a character that looks like the marker.
    """

    colour: str
    dashes: tuple[int, ...]
    marker: str
    sign: str


def style_of(run: int) -> Style:
    """Return the style of a run by its place among the runs."""
    marker, sign = _MARKERS[run % len(_MARKERS)]
    return Style(_COLOURS[run % len(_COLOURS)], _DASHES[run % len(_DASHES)], marker, sign)
