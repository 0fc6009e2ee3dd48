"""One job at a time in a run directory at a URL: an object there says who writes, and that it still does."""

import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from hvdtrain.errors import EnvironmentFault
from hvdtrain.storage.object_info import ObjectInfo
from hvdtrain.storage.text import printable
from hvdtrain.storage.urls import (
    MissingObjectError,
    Patience,
    StoreError,
    StorePermissionError,
    info,
    join,
    read,
    remove,
    shown,
    write,
)

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


CLAIM_FILE = "hvdtrain.claim"
FRESH_SECONDS = 60.0  # a holder that gives no sign of life for so long is taken for dead
BEAT_SECONDS = 10.0
_MAX_BYTES = 4096
_YEAR_10000 = 253_402_300_800.0
_LOOK_SECONDS = 2.0
_SETTLE_SECONDS = 0.5
_READS, _READ_SECONDS = 5, 0.2  # of a claim that is being written: some file systems show half of it
_MOST_WAIT_SECONDS = 180.0  # for a job that was killed and uploads what is left
_PATIENCE = Patience(stall_seconds=10.0, tries=3)
_REMEDY = "Wait until it has ended or end it, or choose another --run-dir."


@dataclass(frozen=True)
class Holder:
    """What a claim says.

    Attributes:
        id: a random name of the claim of one job.
        host: the host of the process that uploads.
        process: its number.
        started: when the process started, in the system's own unit.
        system: what numbers the processes: a boot of a host, or a container of it.
        since: when the job claimed the run directory, in seconds since 1970 by that host's clock.
        beat: the number of signs of life.
        writer: the claim of the last job that has changed the run.
        is_released: whether the job has ended.
        is_ending: whether the job has ended, and what is left of it is being uploaded.
    """

    id: str = ""
    host: str = ""
    process: int = 0
    started: int = 0
    system: str = ""
    since: float = 0.0
    beat: int = 0
    writer: str = ""
    is_released: bool = False
    is_ending: bool = False

    @classmethod
    def parse(cls, content: bytes) -> "Holder":
        """Return what an object says; one without an id if it is none that this version can read."""
        with suppress(ValueError, TypeError, AttributeError, RecursionError):
            found = json.loads(content)
            empty = cls()
            values = {one.name: found[one.name] for one in fields(cls) if one.name in found}
            is_claim = all(isinstance(value, type(getattr(empty, name))) for name, value in values.items())
            if is_claim and values.get("id") and 0 <= values.get("since", 0.0) < _YEAR_10000:
                return cls(**values)
        return cls(beat=zlib.crc32(content))  # one that changes is of a job that lives

    @classmethod
    def of_this_process(cls) -> "Holder":
        """Return a new claim of this process."""
        process = os.getpid()
        started = _start_of(process) or 0
        return cls(uuid4().hex, socket.gethostname(), process, started, _system(), time.time())

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to be no more: it is one of this system and is not there."""
        if not self.system or self.system != _system() or self.process <= 0 or self.started <= 0:
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        start = _start_of(self.process)
        return start is not None and start != self.started

    def describe(self) -> str:
        """Return who it is, in words that follow "another job"."""
        if not self.id:
            return f", whose {CLAIM_FILE} is damaged or of another version of hvdtrain"
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f": process {self.process} on {printable(self.host, lines=False)}, since {since}"


class Claim:
    """The claim of one job on a run directory.

    Args:
        url: the run directory.
        note: is told what the user should know.

    Attributes:
        holder: what the claim says of this job.
        before: what it said before this job; None if there was none.
        lost: why this job may no longer write; empty while it may.
        is_held: whether this job has the run directory.
    """

    def __init__(self, url: str, note: Callable[[str], None] = lambda text: None) -> None:
        self._url = url
        self._object = join(url, CLAIM_FILE)
        self._note = note
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
        found = self._read()
        if found is not None and not (found.is_released or found.has_ended):
            found = self._wait_for(found)
        self.before = found
        self.holder = replace(self.holder, writer="" if found is None else found.writer)
        self._write()
        time.sleep(_SETTLE_SECONDS)  # of two jobs that claim it at once, the last one has it
        after = self._read()
        if after is not None and after.id != self.holder.id:
            raise self._in_use(after)
        self.is_held = True

    def beat(self) -> None:
        """Give a sign of life.

        Raises:
            StoreError: If the store does not answer.
        """
        with self._lock:
            if not self.is_held:
                return
            self._check()
            if not self.lost:
                self.holder = replace(self.holder, beat=self.holder.beat + 1)
                self._write()

    def check(self) -> None:
        """Check that nobody has taken the run directory over.

        Raises:
            StoreError: If somebody has, the claim cannot be read, or the store does not answer.
        """
        with self._lock:
            is_readable = self._check()
        if self.lost:
            raise StoreError(self.lost)
        if not is_readable:
            raise StoreError(f"{shown(self._object)} is not what was written")

    def mark_writer(self) -> None:
        """Say that from now on this job changes the run; raises as ``beat`` does."""
        with self._lock:
            self.holder = replace(self.holder, writer=self.holder.id)
        self.beat()

    def mark_end(self) -> None:
        """Say that the job has ended and only uploads; raises as ``beat`` does."""
        with self._lock:
            self.holder = replace(self.holder, is_ending=True)
        self.beat()

    def release(self) -> None:
        """Let other jobs have the run directory; raises as ``beat`` does."""
        with self._lock:
            if not self.is_held:
                return
            self._check()
            if self.lost:
                return
            self.is_held = False
            if self.before is None and self.holder.writer != self.holder.id:
                with suppress(StorePermissionError):  # where nothing can be deleted
                    remove(self._object, _PATIENCE)  # nothing was written there
                    return
            self.holder = replace(self.holder, is_released=True, is_ending=False)
            self._write()

    def _check(self) -> bool:
        """Find out whether another job has the run directory; return whether the claim can be read."""
        found = self._read()
        if found is not None and not found.id:
            return False
        if found is not None and found.id != self.holder.id:
            self.lost = (
                f"the run directory {shown(self._url)} was taken over by another job{found.describe()}"
            )
        return True

    def _read(self) -> Holder | None:
        found = Holder()
        for number in range(_READS):
            if number:
                time.sleep(_READ_SECONDS)
            try:
                found = Holder.parse(read(self._object, _MAX_BYTES, _PATIENCE))
            except MissingObjectError:
                return None
            if found.id:
                break
        return found

    def _write(self) -> None:
        write(self._object, json.dumps(asdict(self.holder)).encode(), _PATIENCE)

    def _wait_for(self, found: Holder) -> Holder | None:
        """Wait until the holder of a claim has ended or counts as dead; return what the claim says then."""
        began = time.monotonic()
        dead_seconds = began + FRESH_SECONDS - self._age_seconds()
        if dead_seconds > began:
            self._note(
                f"{shown(self._url)} was in use by another job{found.describe()}: waiting "
                f"{dead_seconds - began:.0f} s for a sign of life"
            )
        while time.monotonic() < dead_seconds:
            time.sleep(max(0.0, min(_LOOK_SECONDS, dead_seconds - time.monotonic())))
            now = self._read()
            if now is None or now.is_released or now.has_ended:
                return now
            if (now.id, now.beat) != (found.id, found.beat):
                if not now.is_ending or time.monotonic() > began + _MOST_WAIT_SECONDS:
                    raise self._in_use(now)
                found, dead_seconds = now, time.monotonic() + FRESH_SECONDS
        return found

    def _age_seconds(self) -> float:
        """Return how long ago the last sign of life was, by the store's clock; 0 if it does not tell."""
        probe = join(self._url, f"{CLAIM_FILE}-clock")
        write(probe, b"", _PATIENCE)
        try:
            now, last = _modified(info(probe, _PATIENCE)), _modified(info(self._object, _PATIENCE))
        except MissingObjectError:
            return 0.0
        finally:
            with suppress(StoreError):  # where nothing can be deleted
                remove(probe, _PATIENCE)
        return 0.0 if now is None or last is None else max(0.0, now - last)

    def _in_use(self, holder: Holder) -> EnvironmentFault:
        return EnvironmentFault(
            f"run_dir: {shown(self._url)} is in use by another job{holder.describe()}", _REMEDY
        )


def _modified(found: ObjectInfo) -> float | None:
    return None if found.modified is None else found.modified.timestamp()


def _system() -> str:
    """Return a name of what numbers this process; empty if that cannot be found out."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _start_of(process: int) -> int | None:
    """Return when a process started, in ticks since the system did; 0 if it has ended, None if not known."""
    with suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = stat.rpartition(")")[2].split()
        return 0 if state in "ZX" else int(fields[18])
    return None
