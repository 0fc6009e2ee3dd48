"""The lines of metrics.jsonl as values, and the last of them, which every worker keeps."""

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.callbacks import CALLBACK, EVENT
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.jsonl import lines_of, to_json, write_parts
from hvdtrain.storage.files import open_regular, parse_line
from hvdtrain.storage.text import counted

TAIL = 256  # records that are kept of a log
_BLOCK_BYTES = 1 << 16


def cut_tail(path: Path, step: int, redone: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Drop from a log what came after a step, and what is no whole line; return the last records.

    Lines of the step itself are dropped if their phases will be written again (``redone``), with the lines of
    callbacks after them, which will be called again.
    """
    tail: deque[dict[str, Any]] = deque(maxlen=TAIL)
    end, is_cut, is_redone, later = 0, False, False, list[bytes]()
    try:
        for line in lines_of(path):
            record = parse_line(line) if line.endswith(b"\n") else None
            found = None if record is None else record.get("step")
            stays = isinstance(found, int) and not isinstance(found, bool) and found <= step
            if record is not None and found == step:
                is_redone |= record.get("phase") in redone
                stays &= record.get("phase") not in ((*redone, CALLBACK) if is_redone else ())
            if record is not None and stays:
                tail.append(record)
            if not stays:
                is_cut = True
            elif is_cut:
                later.append(line)
            else:
                end += len(line)
    except FileNotFoundError:
        return []
    if later:
        write_parts(path, _parts(path, end, later))
    elif is_cut:  # without room for another file
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.ftruncate(file, end)
            os.fsync(file)
        finally:
            os.close(file)
    return list(tail)


def cut_log(path: Path, step: int) -> None:
    """Cut a log as ``cut_tail`` does; for step 0, which keeps nothing of it, rename it to ``*.old``."""
    if step:
        cut_tail(path, step)
    elif path.exists() and any(lines_of(path)):
        path.replace(path.with_name(path.name + ".old"))


def _parts(path: Path, end: int, lines: Sequence[bytes]) -> Iterator[bytes]:
    """Yield a file up to a byte, then these lines."""
    with open_regular(path, follow=False) as file:
        while end > 0 and (block := file.read(min(end, _BLOCK_BYTES))):
            end -= len(block)
            yield block
    yield from lines


KEPT = 64

Key = tuple[Any, ...]


@dataclass(frozen=True)
class WorkersChange:
    """That other workers continue with an elastic job."""

    # who is no longer there, with the reason, as text such as "rank 2 on h2: killed (SIGKILL)"
    left: tuple[str, ...]
    joined: tuple[str, ...]  # who came, as text
    cause: str  # what began the change, as text
    generation: int  # the number of the world that continues
    pause_seconds: float  # the time without training

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
        """Return it as text."""
        parts = [f"{counted(workers, 'worker')} from step {step + 1:,} on"]
        parts += [f"left: {', '.join(self.left)}"] if self.left else []
        parts += [f"joined: {', '.join(self.joined)}"] if self.joined else []
        parts += [f"cause: {self.cause}"] if self.cause and not (self.left or self.joined) else []
        return "; ".join([*parts, f"{self.pause_seconds:.1f} s without training"])


def record_of(phase: str, step: StepInfo, values: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
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


def key_of(record: Mapping[str, Any]) -> Key:
    """Return what distinguishes a record from others: two workers' records of one thing have the same key."""
    phase, step = record.get("phase"), record.get("step")
    if phase == EVENT:
        return phase, step, record.get("event"), record.get("generation")
    if phase == CALLBACK:
        return phase, step, *sorted(record)
    return phase, step


class RecentRecords:
    """The last records of a run. Every worker keeps them, since any may become rank 0."""

    def __init__(self, records: Iterable[dict[str, Any]] = ()) -> None:
        self._records = deque(records, KEPT)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record; the oldest is dropped for it."""
        self._records.append(record)

    def lacking_in(self, tail: Sequence[Mapping[str, Any]], step: float = math.inf) -> list[dict[str, Any]]:
        """Return the records up to a step that the end of the log lacks; of steps that this end covers."""
        known = {key_of(record) for record in tail}
        first = -1 if len(tail) < TAIL else min(record["step"] for record in tail)
        return [one for one in self._records if first < one["step"] <= step and key_of(one) not in known]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._records)
