"""What the workers of a job send each other about once a second: lines of JSON."""

import json
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

from hvdtrain.elastic.links import LineConnection
from hvdtrain.elastic.watch.connections import Member
from hvdtrain.workers.activity import Activity, ActivityMark

BEAT_SECONDS = 1.0

_MAX_LINE_BYTES = 1 << 18
_LOOK_AFTER_SECONDS = 2.0  # an activity that is older than this is looked at more closely


class WorkerState(NamedTuple):
    """What a worker reports about itself."""

    name: str  # what its training thread does, as text that follows "rank 1 is"
    number: int = 0  # how often that changed before
    step: int = 0  # the training step that it belongs to; 0 if none
    place: int = 0  # where in the training it is; see ``Activity.place``
    is_long: bool = False  # whether it was announced to take long
    age_seconds: float = 0.0  # how long it has lasted
    user_code: str = ""  # where in the user's code it is; empty if it is not there, or not for long

    def __str__(self) -> str:
        """Return what the worker does, with the place in the user's code."""
        return f"{self.name} ({self.user_code})" if self.user_code else self.name


def state_of(mark: ActivityMark) -> WorkerState:
    """Return what this worker reports about itself now."""
    activity: Activity = mark.current
    age_seconds = time.monotonic() - activity.since_seconds
    user_code = mark.user_code() if age_seconds > _LOOK_AFTER_SECONDS else ""
    return WorkerState(
        f"{activity}{mark.part}",
        activity.number,
        activity.step,
        activity.place,
        activity.is_long,
        round(age_seconds, 3),
        user_code,
    )


def read_state(values: Any) -> WorkerState | None:
    """Return the state that a message holds; None if it holds none."""
    kinds = (str, int, int, int, bool, float | int, str)
    if not isinstance(values, list) or len(values) != len(kinds):
        return None
    if not all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True)):
        return None
    return WorkerState(*values)


class Peer(LineConnection):
    """The other end of a connection."""

    def __init__(self, connection: socket.socket, member: Member) -> None:
        super().__init__(connection, _MAX_LINE_BYTES)
        self.member = member

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived. It does not wait; what is no message is dropped."""
        found = []
        for line in self.receive_lines():
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line))
        return [message for message in found if isinstance(message, dict)]

    def send(self, message: dict[str, Any], must_arrive: bool = False) -> None:
        """Send a message without waiting; if the last one is still on its way, this one may be dropped."""
        self.send_bytes(json.dumps(message).encode() + b"\n", may_drop=not must_arrive)
