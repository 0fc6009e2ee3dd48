"""Which lines of a run's log a tracker has.

Beside the log lies a file with a hash of each line that was sent, in order. What both have in common from the
beginning is sent; so a log that was cut back, or that a resumed job wrote anew, is known by what it holds.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.regular_files import open_regular
from hvdtrain.reporting.jsonl import LONGEST_LINE, AppendFile, write_parts

_HASH_BYTES = 8
_READ_BYTES = 1 << 20


class SentLines:
    """The lines of a log, and which of them were sent.

    Args:
        log: the log; there may be none yet.
        path: the file with the hashes.

    Attributes:
        count: lines that were sent and are in the log.

    Raises:
        OSError: If the file with the hashes cannot be read.
    """

    def __init__(self, log: Path, path: Path) -> None:
        self._log, self._path = log, path
        self.count = 0
        self._offset, self._last, self._file = 0, b"", (0, 0)
        self._is_behind = False  # whether the file lacks hashes
        self._hashes = self._read_hashes()
        self._compare()

    def forget(self) -> None:
        """Take no line as sent: the tracker's run is another one.

        Raises:
            OSError: If that cannot be written.
        """
        write_parts(self._path, [])
        self._hashes = b""
        self._compare()

    def unsent(self, limit: int) -> list[bytes]:
        """Return the next lines that were not sent, at most a number of them.

        Raises:
            OSError: If the log cannot be read.
        """
        if not self._is_as_it_was():
            self._compare()
        return self._read(limit)

    def mark_sent(self, lines: Sequence[bytes]) -> None:
        """Note that the next lines were sent.

        Raises:
            OSError: If it cannot be written; this object knows it all the same.
        """
        added = b"".join(map(_hash, lines))
        self._hashes += added
        self.count += len(lines)
        self._offset += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        was_behind, self._is_behind = self._is_behind, True  # until it is written
        if was_behind:
            write_parts(self._path, [self._hashes])
        else:
            _append(self._path, added)
        self._is_behind = False

    def remaining(self) -> int:
        """Return the number of lines that were not sent.

        Raises:
            OSError: If the log cannot be read.
        """
        return len(self.unsent(2**62))

    def _read_hashes(self) -> bytes:
        try:
            with open_regular(self._path, follow=False) as file:
                found = file.read()
        except FileNotFoundError:
            return b""
        return found[: len(found) // _HASH_BYTES * _HASH_BYTES]

    def _compare(self) -> None:
        """Find what log and hashes have in common, and drop the other hashes.

        Raises:
            OSError: If the log cannot be read, or the hashes cannot be written.
        """
        self.count, self._offset, self._last, self._file = 0, 0, b"", (0, 0)
        known = len(self._hashes) // _HASH_BYTES
        while self.count < known and (lines := self._read(min(4096, known - self.count))):
            for line in lines:
                at = self.count * _HASH_BYTES
                if self._hashes[at : at + _HASH_BYTES] != _hash(line):
                    known = self.count
                    break
                self.count, self._offset, self._last = self.count + 1, self._offset + len(line), line
        if self.count * _HASH_BYTES < len(self._hashes):
            self._hashes = self._hashes[: self.count * _HASH_BYTES]
            write_parts(self._path, [self._hashes])

    def _is_as_it_was(self) -> bool:
        """Return whether what was sent is still in the log, by the last line of it."""
        try:
            with open_regular(self._log, follow=False) as file:
                status = os.fstat(file.fileno())
                start = self._offset - len(self._last)
                return (
                    self._file in ((0, 0), (status.st_dev, status.st_ino))
                    and os.pread(file.fileno(), len(self._last), start) == self._last
                )
        except FileNotFoundError:
            return self._offset == 0

    def _read(self, limit: int) -> list[bytes]:
        """Return whole lines from where sending stands."""
        found: list[bytes] = []
        try:
            file = open_regular(self._log, follow=False)
        except FileNotFoundError:
            return found
        with file:
            status = os.fstat(file.fileno())
            self._file = status.st_dev, status.st_ino
            file.seek(self._offset)
            size = 0
            while len(found) < limit and (size < _READ_BYTES or limit > _READ_BYTES):
                line = file.readline(LONGEST_LINE)
                if not line.endswith(b"\n"):
                    break
                found.append(line)
                size += len(line)
        return found


def _append(path: Path, content: bytes) -> None:
    file = AppendFile(path)
    try:
        error = file.append(content)
    finally:
        file.close()
    if error is not None:
        raise error


def _hash(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=_HASH_BYTES).digest()
