"""TensorBoard event files with scalars, encoded here: neither a framework nor TensorBoard is imported.

An event file is a row of records (TFRecord): length, checksum of the length, data, checksum of the data. The
data of each is an ``Event``, a protocol buffer, of which seven fields are used:

- https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto
- https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/summary.proto
- https://protobuf.dev/programming-guides/encoding/
"""

import math
import os
import re
import struct
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from hvdtrain.reporting.jsonl import AppendFile

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7  # fields of Event
_VALUE = 1  # of Summary
_TAG, _SIMPLE_VALUE = 1, 2  # of Summary.Value
_NAME = re.compile(r"events\.out\.tfevents\.(\d{1,11})\..*")
_STATUS, _START = 1, 1  # of SessionLog, and its value


class EventFile:
    """A TensorBoard event file with scalars.

    Args:
        folder: where the file goes.
        resumed_step: steps done, if the run resumed: readers drop what older files have of later ones.
        may_write: as of ``AppendFile``.

    Raises:
        OSError: If the file cannot be opened.
    """

    def __init__(
        self, folder: Path, resumed_step: int | None = None, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        seconds = int(time.time())
        if resumed_step is not None:  # readers take files by name, and another host's clock may be ahead
            seconds = max(seconds, _newest_seconds(folder) + 1)
        self.path = folder / f"events.out.tfevents.{seconds}.{os.getpid()}.hvdtrain"
        self._file = AppendFile(self.path, may_write=may_write)
        self._write(0, encoded_bytes(_FILE_VERSION, b"brain.Event:2"))
        if resumed_step is not None:
            self._write(resumed_step + 1, encoded_bytes(_SESSION_LOG, encoded_varint(_STATUS, _START)))

    def add(self, values: Mapping[str, float], step: int) -> OSError | None:
        """Add scalars at a step; return what went wrong, if something did."""
        scalars = (encoded_bytes(_VALUE, _scalar(tag, value)) for tag, value in values.items())
        return self._write(step, encoded_bytes(_SUMMARY, b"".join(scalars)))

    def add_summary(self, summary: bytes, step: int) -> OSError | None:
        """Add an encoded ``Summary`` at a step; return what went wrong, if something did."""
        return self._write(step, encoded_bytes(_SUMMARY, summary))

    def restore(self) -> str:
        """Make the file anew if it was removed; see ``AppendFile.restore``."""
        return self._file.restore()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, step: int, content: bytes) -> OSError | None:
        at_step = encoded_varint(_STEP, step) if step else b""  # zero is the default, and left out
        event = encoded_key(_WALL_TIME, _DOUBLE) + struct.pack("<d", time.time()) + at_step + content
        return self._file.append(_record(event))


def _newest_seconds(folder: Path) -> int:
    """Return the time in the name of the newest event file in a folder; 0 if there is none."""
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return max((int(match[1]) for match in found if match), default=0)


def _scalar(tag: str, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond fp32
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return encoded_bytes(_TAG, tag.encode()) + encoded_key(_SIMPLE_VALUE, _FLOAT) + packed


def encoded_key(field: int, wire_type: int) -> bytes:
    """Return what precedes the value of a field."""
    return bytes([field << 3 | wire_type])  # one byte, for fields up to 15


def encoded_varint(field: int, value: int) -> bytes:
    """Return a field of a message with a number that is not negative."""
    return encoded_key(field, _VARINT) + _as_varint(value)


def encoded_bytes(field: int, content: bytes) -> bytes:
    """Return a field of a message with bytes, a text or another message."""
    return encoded_key(field, _BYTES) + _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first; the top bit says that another follows."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_checksum(length) + data + _masked_checksum(data)


def _masked_checksum(data: bytes) -> bytes:
    """Return the CRC-32C of data, rotated and shifted as TFRecord wants it."""
    table, checksum = _table(), 0xFFFFFFFF
    for byte in data:
        checksum = table[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    checksum ^= 0xFFFFFFFF
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _table() -> list[int]:
    """Return the table of CRC-32C (Castagnoli): its polynomial 0x1EDC6F41 has its bits reversed here."""
    table = []
    for byte in range(256):
        entry = byte
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)
        table.append(entry)
    return table
