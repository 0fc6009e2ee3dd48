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

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from hvdtrain.storage.files import open_regular

_NAME = re.compile(r"events\.out\.tfevents\.(\d{1,11})\.\d+\.hvdtrain")
_FIRST_BYTES = 4096  # they hold the first record, and the second unless it has many scalars


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
        except (OSError, ValueError, DecodeError, struct.error):
            continue
    return found


def _session(content: bytes) -> Session:
    """Read the first two records of an event file; raises ValueError, DecodeError or struct.error."""
    first, second = map(Event.FromString, _first_records(content))
    if not first.wall_time or not math.isfinite(first.wall_time):
        raise ValueError("no time")
    return Session(first.wall_time, second.step - 1 if second.HasField("session_log") else None)


def _first_records(content: bytes) -> Iterator[bytes]:
    """Yield the data of two records; the second is empty if there is none."""
    place = 0
    for _ in range(2):
        length = struct.unpack_from("<Q", content, place)[0] if place < len(content) else 0
        yield content[place + 12 : place + 12 + length]
        place += 16 + length
