"""One job at a time in a run directory at a URL: an object there says who writes, and that it still does.

It is written on the condition that it is what was read before (of S3: ``If-None-Match`` and ``If-Match``).
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from hvdtrain.errors import EnvironmentFault
from hvdtrain.storage.urls import ChangedObjectError, MissingObjectError, StoreError, join, read, shown, write

CLAIM_FILE = "hvdtrain.claim"
FRESH_SECONDS = 60.0  # a job that gives no sign of life for so long is taken for dead
BEAT_SECONDS = 10.0
_MAX_BYTES = 4096
_LOOK_SECONDS = 2.0
_SETTLE_SECONDS = 0.5  # for stores that know no conditions: of two jobs that claim it, the last one has it


class Claim:
    """The claim of one job on a run directory."""

    def __init__(self, url: str, note: Callable[[str], None] = lambda text: None) -> None:
        self._url, self._note, self._ended = url, note, ""
        self._object, self._lock = join(url, CLAIM_FILE), threading.Lock()
        self.id, self.writer = uuid4().hex, ""  # of this claim, and of the last job that changed the run
        self.lost = ""  # why this job may no longer write; empty while it may
        since = datetime.now(UTC).isoformat(" ", timespec="seconds")
        self._said = {"id": self.id, "host": socket.gethostname(), "process": os.getpid(), "since": since}
        self._beat, self._is_held = 0, False

    def acquire(self, ended: str = "") -> None:
        """Claim the run directory; wait for a sign of life of the job that has it, unless it ``ended``."""
        self._ended = ended
        found, tag = self._read()
        if self._is_of_other(found):
            waits = f"waiting {FRESH_SECONDS:.0f} s for a sign of life"
            self._note(f"{shown(self._url)} was in use by {_described(found)}: {waits}")
        dead_seconds = time.monotonic() + FRESH_SECONDS
        while self._is_of_other(found) and time.monotonic() < dead_seconds:
            time.sleep(_LOOK_SECONDS)
            before, (found, tag) = found, self._read()
            if self._is_of_other(found) and found != before:
                raise self._in_use(found)
        self.writer = found.get("writer", "")
        self._write(tag)
        time.sleep(_SETTLE_SECONDS)
        if (found := self._read()[0]).get("id") != self.id:
            raise self._in_use(found)
        self._is_held = True

    def update(self, is_released: bool = False) -> None:
        """Give a sign of life; raises as ``check`` does."""
        with self._lock:
            tag = self._look()
            if self._is_held:
                self._beat += 1
                self._is_held = not is_released
                self._write(tag, is_released)

    def check(self) -> None:
        """Check that nobody has taken the run directory over."""
        with self._lock:
            self._look()

    def release(self) -> None:
        """Let other jobs have the run directory; raises as ``check`` does."""
        if self._is_held:
            self.update(is_released=True)

    def _look(self) -> str | None:
        """Return the tag of the claim; raises a StoreError if it is another job's."""
        found, tag = self._read()
        if found and found.get("id") != self.id:
            self.lost = f"the run directory {shown(self._url)} was taken over by {_described(found)}"
        if self.lost:
            raise StoreError(self.lost)
        return tag

    def _read(self) -> tuple[dict[str, Any], str | None]:
        """Return what the claim says, nothing if there is none, and its tag."""
        try:
            content, tag = read(self._object, _MAX_BYTES)
        except MissingObjectError:
            return {}, ""
        with suppress(ValueError):
            if isinstance(found := json.loads(content), dict):
                return found, tag
        return {"damaged": content}, tag

    def _write(self, tag: str | None, is_released: bool = False) -> None:
        """Write the claim if it is still the one with that tag; if not, who reads it next finds out."""
        said = {**self._said, "writer": self.writer, "beat": self._beat, "is_released": is_released}
        with suppress(ChangedObjectError):  # or the answer to the first try was lost
            write(self._object, json.dumps(said).encode(), over=tag)

    def _is_of_other(self, found: dict[str, Any]) -> bool:
        """Return whether a claim is that of a job that may not have ended."""
        has_ended = found.get("id") == self._ended and found.get("host") == self._said["host"]
        return bool(found) and not has_ended and not found.get("is_released")

    def _in_use(self, found: dict[str, Any]) -> EnvironmentFault:
        return EnvironmentFault(
            f"run_dir: {shown(self._url)} is in use by {_described(found)}",
            "Wait until it has ended or end it, or choose another --run-dir.",
        )


def _described(found: dict[str, Any]) -> str:
    if not found.get("id"):
        return f"another job, whose {CLAIM_FILE} is damaged"
    return f"another job: process {found.get('process')} on {found.get('host')}, since {found.get('since')}"
