"""One job at a time in a run directory at a URL: an object there says who writes, and that it still does.

It is written on the condition that it is what was read before (of S3: ``If-None-Match`` and ``If-Match``).
"""

import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field, TypeAdapter

from hvdtrain.errors import EnvironmentFault
from hvdtrain.storage.text import printable
from hvdtrain.storage.urls import (
    ChangedObjectError,
    ExistingObjectError,
    MissingObjectError,
    Patience,
    StoreError,
    StorePermissionError,
    join,
    read_version,
    remove,
    shown,
    write,
)

CLAIM_FILE = "hvdtrain.claim"
FRESH_SECONDS = 60.0  # a holder that gives no sign of life for so long is taken for dead
BEAT_SECONDS = 10.0
_MAX_BYTES = 4096
_YEAR_10000 = 253_402_300_800.0
_LOOK_SECONDS = 2.0
_SETTLE_SECONDS = 0.5  # for stores that know no conditions: of two jobs that claim it, the last one has it
_READS, _READ_SECONDS = 5, 0.2  # of a claim that is being written: some file systems show half of it
_MOST_WAIT_SECONDS = 180.0  # for a job that was killed and uploads what is left
_PATIENCE = Patience(stall_seconds=10.0, tries=3)


@dataclass(frozen=True)
class Holder:
    """What a claim says.

    Attributes:
        id: a random name of the claim of one job; empty if this version cannot read the claim.
        host, process: the host of the process that uploads, and its number.
        since: when the job claimed the run directory, in seconds since 1970 by that host's clock.
        beat: the number of signs of life.
        writer: the claim of the last job that has changed the run.
        is_released: whether the job has ended.
        is_ending: whether the job has ended, and what is left of it is being uploaded.
    """

    id: str = ""
    host: str = ""
    process: int = 0
    since: Annotated[float, Field(ge=0, lt=_YEAR_10000)] = 0.0
    beat: int = 0
    writer: str = ""
    is_released: bool = False
    is_ending: bool = False

    @classmethod
    def parse(cls, content: bytes) -> "Holder":
        """Return what an object says; one without an id if it is none that this version can read."""
        with suppress(ValueError):
            if (found := TypeAdapter(cls).validate_json(content, strict=True)).id:
                return found
        return cls(beat=zlib.crc32(content))  # one that changes is of a job that lives

    @classmethod
    def of_this_process(cls) -> "Holder":
        """Return a new claim of this process."""
        return cls(uuid4().hex, socket.gethostname(), os.getpid(), time.time())

    def describe(self) -> str:
        """Return who it is, as what follows "another job"."""
        if not self.id:
            return f", whose {CLAIM_FILE} is damaged or of another version of hvdtrain"
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f": process {self.process} on {printable(self.host, lines=False)}, since {since}"


class Claim:
    """The claim of one job on a run directory.

    Args:
        url: the run directory.
        note: called with what the user should know.
        ended: the claim of a job of this host that is known to have ended; empty if none is.

    Attributes:
        holder: what the claim says of this job.
        before: what it said before this job; None if there was none.
        lost: why this job may no longer write; empty while it may.
        is_held: whether this job has the run directory.
    """

    def __init__(self, url: str, note: Callable[[str], None] = lambda text: None, ended: str = "") -> None:
        self._url, self._note, self._ended = url, note, ended
        self._object = join(url, CLAIM_FILE)
        self._lock = threading.Lock()
        self.holder = Holder.of_this_process()
        self.before: Holder | None = None
        self.lost = ""
        self.is_held = False

    def acquire(self) -> None:
        """Claim the run directory; wait for a job that gives no sign of life until it counts as dead.

        Raises:
            EnvironmentFault: If another job has it, naming it.
            StoreError: If the store cannot be read or written.
        """
        found, tag = self._read()
        if found is not None and not self._has_ended(found):
            found, tag = self._wait_for(found, tag)
        self.before = found
        self.holder = replace(self.holder, writer="" if found is None else found.writer)
        self._write(tag)
        time.sleep(_SETTLE_SECONDS)
        after, _ = self._read()
        if after is not None and after.id != self.holder.id:
            raise self._in_use(after)
        self.is_held = True

    def update(self, **changes: Any) -> None:
        """Give a sign of life, and say what has changed.

        Args:
            changes: fields of the holder.

        Raises:
            StoreError: If the store does not answer.
        """
        with self._lock:
            if not self.is_held:
                return
            self.holder = replace(self.holder, **changes, beat=self.holder.beat + 1)
            _, tag = self._look()
            if not self.lost:
                self._write(tag)

    def check(self) -> None:
        """Check that nobody has taken the run directory over.

        Raises:
            StoreError: If somebody has, the claim cannot be read, or the store does not answer.
        """
        with self._lock:
            found, _ = self._look()
        if self.lost:
            raise StoreError(self.lost)
        if found is not None and not found.id:
            raise StoreError(f"{shown(self._object)} is not what was written")

    def release(self) -> None:
        """Let other jobs have the run directory; raises as ``update`` does."""
        with self._lock:
            if not self.is_held:
                return
            _, tag = self._look()
            if self.lost:
                return
            self.is_held = False
            if self.before is None and self.holder.writer != self.holder.id:
                with suppress(StorePermissionError):  # where nothing can be deleted
                    remove(self._object, _PATIENCE)  # nothing was written there
                    return
            self.holder = replace(self.holder, is_released=True, is_ending=False)
            self._write(tag)

    def _look(self) -> tuple[Holder | None, str | None]:
        """Find out whether another job has the run directory; return what the claim says, and its tag."""
        found, tag = self._read()
        if found is not None and found.id not in ("", self.holder.id):
            self.lost = (
                f"the run directory {shown(self._url)} was taken over by another job{found.describe()}"
            )
        return found, tag

    def _read(self) -> tuple[Holder | None, str | None]:
        found, tag = Holder(), None
        for number in range(_READS):
            time.sleep(_READ_SECONDS if number else 0.0)
            try:
                content, tag = read_version(self._object, _MAX_BYTES, _PATIENCE)
            except MissingObjectError:
                return None, ""
            found = Holder.parse(content)
            if found.id:
                break
        return found, tag

    def _write(self, tag: str | None) -> None:
        """Write the claim if it is still the one with that tag; if not, who reads it next finds out."""
        with suppress(ChangedObjectError, ExistingObjectError):  # or the answer to the first try was lost
            write(self._object, json.dumps(asdict(self.holder)).encode(), _PATIENCE, over=tag)

    def _wait_for(self, found: Holder, tag: str | None) -> tuple[Holder | None, str | None]:
        """Wait until the holder of a claim has ended or counts as dead; return what the claim says then."""
        self._note(
            f"{shown(self._url)} was in use by another job{found.describe()}: waiting "
            f"{FRESH_SECONDS:.0f} s for a sign of life"
        )
        began = time.monotonic()
        dead_seconds = began + FRESH_SECONDS
        while time.monotonic() < dead_seconds:
            time.sleep(_LOOK_SECONDS)
            now, tag = self._read()
            if now is None or self._has_ended(now):
                return now, tag
            if (now.id, now.beat) != (found.id, found.beat):
                if not now.is_ending or time.monotonic() > began + _MOST_WAIT_SECONDS:
                    raise self._in_use(now)
                found, dead_seconds = now, time.monotonic() + FRESH_SECONDS
        return found, tag

    def _has_ended(self, found: Holder) -> bool:
        is_of_this_host = bool(found.id) and found.id == self._ended and found.host == self.holder.host
        return found.is_released or is_of_this_host

    def _in_use(self, holder: Holder) -> EnvironmentFault:
        return EnvironmentFault(
            f"run_dir: {shown(self._url)} is in use by another job{holder.describe()}",
            "Wait until it has ended or end it, or choose another --run-dir.",
        )
