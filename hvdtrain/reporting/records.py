"""The lines of metrics.jsonl as values, and the last of them, which every worker keeps."""

import errno
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.callbacks import CALLBACK, EVENT
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.jsonl import LONGEST_LINE, lines_of, to_json, write_parts
from hvdtrain.storage.files import open_regular
from hvdtrain.storage.text import counted

KEPT_IN_A_ROW = 64  # lines that stay, after which no line before them is looked at
_BLOCK_BYTES = 1 << 16


class Line(NamedTuple):
    """A line of a log."""

    first_byte: int  # where it begins in the file
    text: bytes  # the line, with its end unless it was not written out
    record: dict[str, Any] | None  # its values; None if it is not a line of a log with a step


class Tail(NamedTuple):
    """The end of a log that was cut."""

    records: list[dict[str, Any]]  # those that stay, of the lines that were looked at; the last last
    is_all: bool  # whether the whole log was looked at


def cut_tail(path: Path, step: int, redone: Sequence[str] = (), in_a_row: int = KEPT_IN_A_ROW) -> Tail:
    """Drop from the end of a log what came after a step, and what is no whole line.

    Lines are looked at from the end until a number of them in a row stays.

    Args:
        path: the log, each of whose lines has a ``step``; there may be none.
        step: the last step to keep.
        redone: phases that will be written again for that step. Their lines of it are dropped, with the lines
            of callbacks after them, which will be called again.
        in_a_row: how many lines in a row stay, so that no line before them is looked at.

    Raises:
        OSError: If it cannot be read or cut, is no regular file, or has a line that is too long for one of
            hvdtrain's.
    """
    try:
        lines = _last_lines(path, lambda record: _stays(record, step, redone), in_a_row)
    except FileNotFoundError:
        return Tail([], is_all=True)
    kept, repeated = [], False
    for line in lines:
        phase = None if line.record is None else line.record.get("phase")
        is_last = line.record is not None and line.record["step"] == step
        repeated = repeated or (is_last and phase in redone)
        if _stays(line.record, step, redone) and not (repeated and is_last and phase == "callback"):
            kept.append(line)
    _keep(path, lines, kept)
    records = [line.record for line in kept if line.record is not None]
    return Tail(records, is_all=not lines or lines[0].first_byte == 0)


def cut_log(path: Path, step: int, in_a_row: int = KEPT_IN_A_ROW) -> None:
    """Cut a log as ``cut_tail`` does. If nothing of it is kept, which step 0 means, rename it to ``*.old``.

    Raises:
        OSError: If it cannot be cut.
    """
    if step:
        cut_tail(path, step, in_a_row=in_a_row)
    elif path.exists() and any(lines_of(path)):
        path.replace(path.with_name(path.name + ".old"))


def _keep(path: Path, lines: Sequence[Line], kept: Sequence[Line]) -> None:
    """Leave of the last lines of a file those that are kept.

    Raises:
        OSError: If that cannot be; then the file is as it was.
    """
    if len(kept) == len(lines):
        return
    whole = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(lines, kept, strict=False)))
    end = lines[whole].first_byte
    if whole == len(kept):  # only the end goes
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.ftruncate(file, end)
            os.fsync(file)
        finally:
            os.close(file)
        return
    write_parts(path, _parts(path, end, kept[whole:]))


def _parts(path: Path, end: int, lines: Sequence[Line]) -> Iterator[bytes]:
    """Yield a file up to a byte, then these lines."""
    with open_regular(path, follow=False) as file:
        while end > 0 and (block := file.read(min(end, _BLOCK_BYTES))):
            end -= len(block)
            yield block
    yield from (line.text for line in lines)


def _last_lines(path: Path, stays: Callable[[dict[str, Any] | None], bool], in_a_row: int) -> list[Line]:
    """Return the last lines of a log, from the first of some in a row that stay."""
    lines: list[Line] = []
    found = 0
    with open_regular(path, follow=False) as file:
        for first_byte, text in _backwards(file, path):
            line = Line(first_byte, text, _record_of(text))
            lines.append(line)
            found = found + 1 if stays(line.record) else 0
            if found == in_a_row:
                break
    return lines[::-1]


def _backwards(file: BufferedReader, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file from the last to the first, with where they begin."""
    end = file.seek(0, os.SEEK_END)
    parts: list[bytes] = []  # of the line whose beginning is not found yet, the last part first
    size = 0
    while end > 0:
        first = max(0, end - _BLOCK_BYTES)
        file.seek(first)
        block = file.read(end - first)
        stop = len(block)
        # the newline at the very end of what is looked at ends the line before it
        while (newline := block.rfind(b"\n", 0, stop)) >= 0:
            text = block[newline + 1 : stop] + b"".join(reversed(parts))
            if text:
                yield first + newline + 1, text
            parts, size, stop = [b"\n"], 1, newline
        parts.append(block[:stop])
        size += stop
        if size > LONGEST_LINE:
            raise OSError(errno.EINVAL, f"it has a line of more than {LONGEST_LINE:,} bytes", str(path))
        end = first
    if text := b"".join(reversed(parts)):
        yield 0, text


def _record_of(text: bytes) -> dict[str, Any] | None:
    if not text.endswith(b"\n"):
        return None
    try:
        record = json.loads(text.decode())
        step = record.get("step")
    except (ValueError, AttributeError, RecursionError):
        return None
    return record if isinstance(step, int) and not isinstance(step, bool) else None


def _stays(record: dict[str, Any] | None, step: int, redone: Sequence[str]) -> bool:
    if record is None or record["step"] > step:
        return False
    return record["step"] < step or record.get("phase") not in redone


KEPT = 64

Key = tuple[Any, ...]


@dataclass(frozen=True)
class WorkersChange:
    """That other workers go on with an elastic job."""

    # who is no longer there, with the reason, in words such as "rank 2 on h2: killed (SIGKILL)"
    left: tuple[str, ...]
    joined: tuple[str, ...]  # who came, in words
    cause: str  # what began the change, in words
    generation: int  # the number of the world that goes on
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


def key_of(record: Mapping[str, Any]) -> Key:
    """Return what tells a record from others: two workers' records of one thing have the same key."""
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

    def up_to(self, step: int) -> list[dict[str, Any]]:
        """Return the records of steps up to this one, in order."""
        return [record for record in self._records if record["step"] <= step]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._records)
