"""When a run started and resumed, from the first records of its TensorBoard event files.

``event_file`` says what these hold. Each start of a job makes a file, and only the second record of one that
resumes is a session log.
"""

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hvdtrain.regular_files import open_regular

_NAME = re.compile(r"events\.out\.tfevents\.(\d{1,11})\.\d+\.hvdtrain")
_FIRST_BYTES = 4096  # they hold the first record, and the second unless it has many scalars
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types
_WALL_TIME, _STEP, _SESSION_LOG = 1, 2, 7  # fields of Event


class Session(NamedTuple):
    """That a process began to write an event file.

    Attributes:
        began: when, in seconds since 1970.
        resumed_step: steps that were done, if the run resumed; None if it began.
    """

    began: float
    resumed_step: int | None


def sessions_in(folder: Path) -> list[Session]:
    """Return when processes began to write event files in a run directory, in order.

    Files that cannot be read, or are not hvdtrain's, are left out.
    """
    try:
        matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except OSError:
        return []
    found = []
    for _, path in sorted((int(match[1]), path) for match, path in matches if match):
        try:
            with open_regular(path) as file:
                found.append(_session(file.read(_FIRST_BYTES)))
        except (OSError, ValueError, IndexError, KeyError, struct.error):
            continue
    return found


def _session(content: bytes) -> Session:
    """Read the first two records of an event file; raises ValueError, IndexError or struct.error."""
    first, second = (_fields_of(record) for record in _first_records(content))
    began = struct.unpack("<d", first[_WALL_TIME])[0]
    if not math.isfinite(began):
        raise ValueError("no time")
    is_resumed = _SESSION_LOG in second
    step = int.from_bytes(second[_STEP], "little") if is_resumed else 0
    return Session(began, step - 1 if is_resumed else None)


def _first_records(content: bytes) -> Iterator[bytes]:
    """Yield the data of two records; the second is empty if there is none."""
    place = 0
    for _ in range(2):
        length = struct.unpack_from("<Q", content, place)[0] if place < len(content) else 0
        yield content[place + 12 : place + 12 + length]
        place += 16 + length


def _fields_of(event: bytes) -> dict[int, bytes]:
    """Return the fields of an Event; numbers as eight bytes, the lowest first."""
    fields: dict[int, bytes] = {}
    place = 0
    while place < len(event):
        key, place = _read_varint(event, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _read_varint(event, place)
            fields[key >> 3] = (value & (1 << 64) - 1).to_bytes(8, "little")
            continue
        size = {_DOUBLE: 8, _FLOAT: 4}.get(kind, 0)
        if kind == _BYTES:
            size, place = _read_varint(event, place)
        fields[key >> 3] = event[place : place + size]
        place += size
    return fields


def _read_varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
