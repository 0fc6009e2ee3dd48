"""The lines of metrics.jsonl as values, and the last of them, which every worker keeps."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.jsonl import parse_line, to_json
from hvdtrain.storage.text import counted

KEPT = 64
TRAIN, EVAL, CALLBACK, EVENT = "train", "eval", "callback", "event"

Key = tuple[Any, ...]


@dataclass(frozen=True)
class WorkersChange:
    """That other workers go on with an elastic job.

    Attributes:
        left: who is no longer there, with the reason, in words such as "rank 2 on h2: killed (SIGKILL)".
        joined: who came, in words.
        cause: what began the change, in words.
        generation: the number of the world that goes on.
        pause_seconds: the time without training.
    """

    left: tuple[str, ...]
    joined: tuple[str, ...]
    cause: str
    generation: int
    pause_seconds: float

    def values(self) -> dict[str, Any]:
        """Return what its line in metrics.jsonl says."""
        return {
            "event": "changed",
            "left": list(self.left),
            "joined": list(self.joined),
            "cause": self.cause,
            "generation": self.generation,
            "pause_seconds": round(self.pause_seconds, 3),
        }

    def describe(self, workers: int, step: int) -> str:
        """Return it in words.

        Args:
            workers: number of workers from now on.
            step: steps done.
        """
        parts = [f"{counted(workers, 'worker')} from step {step + 1:,} on"]
        parts += [f"left: {', '.join(self.left)}"] if self.left else []
        parts += [f"joined: {', '.join(self.joined)}"] if self.joined else []
        parts += [f"cause: {self.cause}"] if self.cause and not (self.left or self.joined) else []
        return "; ".join([*parts, f"{self.pause_seconds:.1f} s without training"])


def record_of(phase: str, step: StepInfo, values: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return a line of metrics.jsonl.

    Args:
        phase: what it is of: "train", "eval", "callback" or "event".
        step: the last step before it.
        values: its own values by name.
        seconds: time spent training.
    """
    return {
        "phase": phase,
        "step": step.step,
        "samples": step.samples,
        "epoch": round(step.epoch, 6),
        **values,
        "workers": step.workers,
        "seconds": round(seconds, 4),
    }


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a record as metrics.jsonl has it."""
    return (to_json(record) + "\n").encode()


def parse_lines(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the records of lines, with NaN where a number is not finite; a line that is cut is left out."""
    records = []
    for line in lines:
        record = parse_line(line)
        if record is not None and isinstance(record.get("step"), int):
            records.append(record if record.get("phase") == EVENT else _with_nan(record))
    return records


def _with_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in record.items()}


def key_of(record: Mapping[str, Any]) -> Key:
    """Return what tells a record from others: two workers' records of one thing have the same key."""
    phase, step = record.get("phase"), record.get("step")
    if phase == EVENT:
        return phase, step, record.get("event"), record.get("generation")
    if phase == CALLBACK:
        return phase, step, *sorted(record)
    return phase, step


class RecentRecords:
    """The last records of a run. Every worker keeps them, since any may become rank 0.

    Args:
        records: those that are there already.
    """

    def __init__(self, records: Iterable[dict[str, Any]] = ()) -> None:
        self._records = deque(records, KEPT)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record; the oldest is dropped for it."""
        self._records.append(record)

    def up_to(self, step: int) -> list[dict[str, Any]]:
        """Return the records of steps up to this one, in order."""
        return [record for record in self._records if record["step"] <= step]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._records)
