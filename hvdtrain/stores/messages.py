"""What a job and its uploading process tell each other: one line of JSON each."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# what the job tells
START = "start"  # steps done, or null: the job changes the run from now on
FLUSH = "flush"  # a number: upload all that is there, then say so
OVER = "over"  # seconds: the job has ended; upload what is left, for so long
# what the process tells
BEGUN = "begun"  # where the run stands
FAILED = "failed"  # why the job cannot begin
NOTE = "note"  # what the user should know
STATE = "state"  # how the uploads stand
FLUSHED = "flushed"  # the number of a flush that is done


@dataclass(frozen=True)
class UploadState:
    """How the uploads stand.

    Attributes:
        whole: names of the checkpoints that are whole in the store.
        problem: why nothing can be uploaded now; empty if it can.
        lost: why nothing is uploaded any more: another job has the run directory; empty otherwise.
        moved_bytes: what was moved so far, to and from the store; what was moved again counts once.
        failing_seconds: for how long nothing could be uploaded.
    """

    whole: tuple[str, ...] = ()
    problem: str = ""
    lost: str = ""
    moved_bytes: int = 0
    failing_seconds: float = 0.0

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "UploadState":
        """Return what was sent."""
        return cls(**{**values, "whole": tuple(values["whole"])})


class Outbox:
    """Sends lines through a descriptor without waiting for the reader: what it does not take is kept.

    Args:
        descriptor: the descriptor, which is made non-blocking.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self._left = descriptor, b""

    def send(self, kind: str, value: Any) -> None:
        """Send a message."""
        self._left += encode(kind, value)
        self.flush()

    def flush(self) -> None:
        """Send what is left of earlier messages."""
        with suppress(OSError):  # the reader is gone, or has not read the last ones
            while self._left:
                self._left = self._left[os.write(self._descriptor, self._left) :]


def encode(kind: str, value: Any) -> bytes:
    """Return a message as a line."""
    return json.dumps([kind, value]).encode() + b"\n"


def decode(line: bytes) -> tuple[str, Any]:
    """Return the kind and the value of a message.

    Raises:
        ValueError: If the line is none.
    """
    kind, value = json.loads(line)
    return kind, value
