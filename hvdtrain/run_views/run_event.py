"""An event of a run, as a page lists it."""

import math
from collections.abc import Mapping
from typing import NamedTuple


class RunEvent(NamedTuple):
    """Something that happened to a run.

    Attributes:
        kind: "started", "resumed", "workers", "problem" or "ended"; another word for events of other kinds.
        text: it in words.
        place: where it happened, by axis; empty if that is not known.
        time: when, in UTC; empty if that is not known.
    """

    kind: str
    text: str
    place: Mapping[str, float]
    time: str = ""

    def at(self, axis: str, form: str) -> str:
        """Return where it happened on an axis, as text; nothing if that is not known."""
        value = self.place.get(axis, math.nan)
        return form.format(value) if math.isfinite(value) else ""
