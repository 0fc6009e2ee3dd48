"""What is asked of a tracker's library, and what it is sent."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, Field, FiniteFloat

from hvdtrain.callbacks import EVENT
from hvdtrain.early_stopping import LINE_FIELDS

_ADDRESS = re.compile(r"(?<=://)\S+")


class TrackedRun(BaseModel):
    """What is known of a run besides its log, most of which ``tracking/id.json`` holds.

    Attributes:
        id: the name of the run that all trackers have.
        began_seconds: when training began, since the epoch of the system's clock.
        facts: what is known of its last job: the step it began after, hosts, command, commit, changes.
        folder: the run directory.
        config: the resolved config.
    """

    id: str = Field(pattern=r"^[0-9a-z]{8,64}$")
    began_seconds: FiniteFloat
    facts: dict[str, Any] = {}
    folder: Path = Field(default=Path(), exclude=True)
    config: dict[str, Any] = Field(default={}, exclude=True)

    @property
    def resumed(self) -> str:
        """What the last job changed, if it resumed; empty if it did not."""
        step, changes = self.facts.get("step"), "; ".join(map(str, self.facts.get("changes") or []))
        return f"after step {step}: {changes or 'nothing changed'}" if step else ""


@dataclass(frozen=True)
class Row:
    """A line of metrics.jsonl.

    Attributes:
        step: the last step before it.
        seconds: when it was written, since the epoch of the system's clock.
        values: its numbers, by names that begin with the phase: "train/loss"; and its samples and epochs.
    """

    step: int
    seconds: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """A tracker's library. Every method may raise any exception, and is called again then."""

    def open(self, run: TrackedRun) -> str:
        """Find the run there, or make it, and send what is known of it; return its place: a URL or a name."""
        ...

    def send(self, rows: Sequence[Row]) -> None:
        """Send lines of the log."""
        ...

    def checkpoint(self, folder: Path) -> None:
        """Send a checkpoint."""
        ...

    def end(self, status: str, error: str) -> None:
        """Send how the run ended, and wait for it; there is no status if another worker continues it."""
        ...


def row_of(line: bytes, began_seconds: float) -> Row | None:
    """Return a line of metrics.jsonl as trackers are sent it; None if it holds no record."""
    try:
        record = json.loads(line)
        step, phase = record["step"], str(record["phase"])
        seconds = float(record.get("seconds") or 0.0)
        left_out = LINE_FIELDS - {"workers"} | {"generation"} if phase == EVENT else LINE_FIELDS
        found = {f"{phase}/{name}": value for name, value in record.items() if name not in left_out}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(step, int) or not 0 <= step < 2**63 or not math.isfinite(seconds):
        return None
    found |= {name: record[name] for name in ("samples", "epoch") if name in record}
    values = {
        name: math.nan if value is None else float(value)
        for name, value in found.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
    return Row(step, began_seconds + seconds, values)


def without_password(text: str) -> str:
    """Return a text for files and messages: its addresses have no user, password and query."""
    return _ADDRESS.sub(_shown, text)


def _shown(address: re.Match[str]) -> str:
    before, _, query = address[0].partition("?")
    if "@" in query:  # the question mark may be one of the password's
        return "..."
    return before.rpartition("@")[2]
