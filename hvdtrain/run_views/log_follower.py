"""A log that grows, and is cut back when its run resumes, read again and again."""

import os
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.reporting.log_records import MAX_LINE, BrokenLines, is_window, parse_record
from hvdtrain.reporting.records import EVAL, EVENT
from hvdtrain.storage.files import open_regular

_WHOLE_BYTES = 1_000_000  # at the end of a log; before them, only evaluations and events are read
_COMPARED_BYTES = 256  # before the place where reading goes on
_BLOCK_BYTES = 1 << 22
_KEPT = tuple(f'"{phase}"'.encode() for phase in (EVAL, EVENT))


class News(NamedTuple):
    """What came since a log was last read.

    Attributes:
        records: new records, in order; all of them if it was cut.
        is_cut: whether what was read before is no longer there, or is now another file's.
        kept: how many of the records are the same as before the cut.
    """

    records: list[dict[str, Any]]
    is_cut: bool
    kept: int = 0


class LogFollower:
    """Reads what comes to a log.

    A log that is replaced, or shorter, or has other bytes than those that were read, is read from its start.

    Args:
        path: the log; there may be none yet.

    Attributes:
        broken: the lines that hold no record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._before = b""
        self._lines = array("q")  # hashes of the lines that were read
        self._is_in_long_line = False  # whose first bytes were left out
        self.broken = BrokenLines()

    def poll(self) -> News:
        """Read whole lines that are new; one that is not written out waits for the next time.

        Raises:
            OSError: If the log cannot be read.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            was_there = self._identity is not None
            self._restart(None)
            return News([], was_there)
        before = self._identity, self._offset, self._before, self._lines, self._is_in_long_line
        broken = self.broken
        count = len(self._lines)
        with file:
            try:
                return self._news(file.fileno())
            except OSError:  # what was read is not told: it is read again
                self._identity, self._offset, self._before, self._lines, self._is_in_long_line = before
                self.broken = broken
                del self._lines[count:]
                raise

    def _news(self, file: int) -> News:
        status = os.fstat(file)
        identity = status.st_dev, status.st_ino
        is_cut = self._identity is not None and not self._continues(file, identity, status)
        lines_before = self._lines
        if is_cut or self._identity is None:
            self._restart(identity)
        found = self._read(file, status.st_size)
        kept = self._same_lines(lines_before) if is_cut else 0
        return News([record for _, record in found], is_cut, sum(line < kept for line, _ in found))

    def _continues(self, file: int, identity: tuple[int, int], status: os.stat_result) -> bool:
        if identity != self._identity or status.st_size < self._offset:
            return False
        return os.pread(file, len(self._before), self._offset - len(self._before)) == self._before

    def _restart(self, identity: tuple[int, int] | None) -> None:
        self._identity, self._offset, self._before = identity, 0, b""
        self._lines, self._is_in_long_line, self.broken = array("q"), False, BrokenLines()

    def _same_lines(self, before: "array[int]") -> int:
        """Return how many lines at the start of the log are those of an earlier reading."""
        pairs = enumerate(zip(before, self._lines, strict=False))
        differing = next((index for index, (one, other) in pairs if one != other), None)
        return min(len(before), len(self._lines)) if differing is None else differing

    def _read(self, file: int, size: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the records of new lines, with the lines' numbers."""
        records: list[tuple[int, dict[str, Any]]] = []
        rest = b""
        place = start = self._offset
        while block := os.pread(file, _BLOCK_BYTES, place):
            place += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if (record := self._take(line, size)) is not None:
                    records.append((len(self._lines) - 1, record))
            if len(rest) > MAX_LINE:
                self._offset += len(rest)
                self._is_in_long_line, rest = True, b""
        if self._offset > start:
            length = min(_COMPARED_BYTES, self._offset)
            self._before = os.pread(file, length, self._offset - length)
        return records

    def _take(self, line: bytes, size: int) -> dict[str, Any] | None:
        """Go past a line; return its record, or None if it has none, or one that is left out."""
        self._offset += len(line) + 1
        self._lines.append(hash(line))
        is_rest, self._is_in_long_line = self._is_in_long_line, False
        is_early = self._offset < size - _WHOLE_BYTES
        if is_early and not is_rest and is_window(line):
            return None
        record = None if is_rest or len(line) > MAX_LINE else parse_record(line)
        if record is None:
            self.broken = self.broken.with_line(len(self._lines))
        is_left_out = is_early and not any(word in line for word in _KEPT)
        return None if is_left_out else record
