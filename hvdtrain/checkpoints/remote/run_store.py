"""A run directory at a URL: rank 0 writes its working copy on the disk, and a thread uploads what is new."""

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest, copied
from hvdtrain.checkpoints.remote import stored_checkpoints as stored
from hvdtrain.checkpoints.remote.claim import BEAT_SECONDS, Claim
from hvdtrain.checkpoints.storage import FOLDER, MANIFEST_FILE
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import CheckpointError, ConfigError, EnvironmentFault
from hvdtrain.reporting.jsonl import write_json
from hvdtrain.reporting.lock_state import LOCK_FILE
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE
from hvdtrain.storage.files import read_regular
from hvdtrain.storage.urls import StorePermissionError, entries, join, name, remove, shown, upload
from hvdtrain.workers.activity import ACTIVITY

_RUN_FILES = (METRICS_FILE, SUMMARY_FILE, FOLDER)  # if a directory has one of them, it holds a run
_POLL_SECONDS = 0.5
_LONGEST_WAIT, _LAST_WAIT = 30.0, 2.0  # between attempts while the store fails, and while the job waits
_LOG_SECONDS = 30.0  # between uploads of logs while there are no checkpoints
_SAY_SECONDS = 10.0
_FEW_SECONDS = 2.0  # for what is left if the job has waited for it in vain


class RunStore:
    """A run directory at a URL, for rank 0, which has the lock of ``folder``, its working copy."""

    def __init__(
        self, url: str, folder: Path, keep_last: int | None = None, goal: MetricGoal | None = None
    ) -> None:
        self.url, self.folder = url, folder
        self._notes = list[str]()
        self.claim = Claim(url, self._notes.append)  # the job's claim on it
        self.newest = ""  # the name of the newest good checkpoint at the start, which is in the copy
        self.known: dict[str, Manifest | None] = {}  # of what is in the store, the newest last; None: damaged
        self.whole: set[str] = set()  # the names of those of the working copy that are whole in the store
        self._keep_last, self._goal = keep_last, goal
        self._checkpoints, self._stored = folder / FOLDER, join(url, FOLDER)
        self._scratch = folder / stored.SCRATCH
        self._claims = self._scratch / "claims.json"  # which jobs have written the working copy
        self._later: list[str] = []  # checkpoints that are still to be set aside, the newest last
        self._has_begun = False  # to write in the store
        # versions of logs, and of the manifests of checkpoints that need no upload
        self._seen: dict[Path, tuple[int, ...]] = {}
        self._retained: list[str] = []  # what was here when others were last deleted there
        self._next_logs = 0.0
        self._thread: threading.Thread | None = None
        self._wake, self._is_over = threading.Event(), threading.Event()
        self._failing_since = math.inf
        self._has_given_up = False
        self._problem = ""
        self._wanted = self._done = 0  # the number of the last flush, and of the last that was done

    def begin(self, resumes: bool) -> list[str]:
        """Claim the run directory and bring the working copy to where the run stands; return notes."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        claims = [""]
        with suppress(OSError, ValueError):
            claims = json.loads(read_regular(self._claims, 1 << 16))["claims"]
        claim = self.claim
        claim.acquire(ended=claims[-1])
        threading.Thread(target=self.beat, args=(claim,), daemon=True, name="claim").start()
        is_stored = not {name(one.url) for one in entries(self.url)}.isdisjoint(_RUN_FILES)
        is_here = any((self.folder / one).exists() for one in _RUN_FILES)
        if not resumes and (is_stored or is_here):
            what = "already holds a run" if is_stored else f"has a run on this host alone, {self.folder}"
            raise ConfigError(
                f"run_dir: {shown(self.url)} {what}",
                "Give --resume without a checkpoint, or another --run-dir.",
            )
        if is_stored and is_here and claim.writer not in claims:
            aside = self.folder.with_name(f"{self.folder.name}-set-aside-{time.time_ns():x}")
            aside.mkdir()
            for path in [one for one in self.folder.iterdir() if one.name not in (stored.SCRATCH, LOCK_FILE)]:
                path.rename(aside / path.name)
            text = "the run was continued on another host since this host's copy of it, which is set aside as"
            self._notes.append(f"{text} {aside}")
        write_json(self._claims, {"claims": [claim.writer, claim.id]})
        if is_stored:
            stored.fetch_logs(self.url, self.folder)
        if resumes:
            self._find_newest()
        return self.notes()

    def _find_newest(self) -> None:
        """Find the newest good checkpoint, and bring it into the working copy."""
        self._look()
        here = [path.name for path in storage.checkpoints_in(self._checkpoints)]
        problems: list[str] = []
        for one in sorted({*here, *self.known}, key=storage.step_of, reverse=True):
            path = self._checkpoints / one
            if one in here:
                try:
                    storage.verify(path)
                    self.newest = one
                    break
                except CorruptCheckpoint as corruption:
                    problems.append(f"{path} is damaged: {corruption}; {storage.quarantine(path)}")
            if one in self.known:
                try:
                    stored.fetch(join(self._stored, one), self._checkpoints)
                    self.newest = one
                    break
                except CorruptCheckpoint as corruption:  # it stays: this host may have misread it
                    problems.append(f"{shown(self._stored)}/{one} is damaged: {corruption}")
        if problems and not self.newest:
            raise CheckpointError(
                f"no checkpoint that can be resumed: {'; '.join(problems[:4])}",
                "Try again, also on another host, or choose another --run-dir.",
            )
        if self.newest and self.newest not in self.known:
            yet = f"{self.newest} is not in {shown(self.url)} yet"
            self._notes.append(f"{yet}: it is uploaded from {self.folder}")
        self._notes += [f"checkpoint {text}; it is passed over" for text in problems]

    def _look(self) -> None:
        """Find the checkpoints in the store now."""
        known: dict[str, Manifest | None] = {}
        for one in stored.names_in(self._stored):
            with suppress(CorruptCheckpoint, EnvironmentFault):
                known[one] = None
                known[one] = self.known.get(one) or stored.manifest_of(join(self._stored, one))
                if known[one] is None:
                    del known[one]
        self.known = known

    def values(self, metric: str) -> dict[str, float | None]:
        """Return a metric of the checkpoints in the store, by their names."""
        return {one: manifest.metrics.get(metric) for one, manifest in self.known.items() if manifest}

    def start(self, step: int | None) -> None:
        """Begin to upload what the job writes. Checkpoints there of later steps are set aside."""
        if step is not None:
            self._later = [one for one in self.known if storage.step_of(one) > step]
        self._thread = threading.Thread(target=self.work, daemon=True, name="upload")
        self._thread.start()

    def beat(self, claim: Claim) -> None:
        """Give signs of life until the job has ended. A thread runs it."""
        while not self._is_over.wait(BEAT_SECONDS) and not claim.lost:
            with suppress(Exception):  # the thread must not end: the claim would look left
                claim.update()

    def work(self) -> None:
        """Upload what the job writes until it has ended. A thread runs it."""
        failures = 0
        while not self.lost and not self._is_over.is_set():
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()
            wanted = self._wanted
            try:
                self.round(is_last=wanted > self._done)
            except Exception as error:  # the thread must not end without a word
                failures, reason = failures + 1, " ".join(shown(error).split())
                if not self._problem and not self.lost:
                    self._failing_since = time.monotonic()
                    stays = f"what it writes stays in {self.folder} until the store has it"
                    self._notes.append(f"{reason}; training continues, {stays}")
                self._problem = reason
                self._wake.wait(min(_LAST_WAIT if wanted else _LONGEST_WAIT, 2.0 ** min(failures, 5)))
                continue
            if self._problem:
                self._notes.append(f"{shown(self.url)} answers again, and has all that was written meanwhile")
            self._problem, self._failing_since, failures, self._done = "", math.inf, 0, wanted

    def round(self, *, is_last: bool = False) -> None:
        """Upload what there is to upload now; with ``is_last`` the logs, too."""
        if not self._has_begun:
            self.claim.writer = self.claim.id
            self.claim.update()
            while self._later:
                url = join(self._stored, self._later[-1])
                aside = stored.set_aside(url)
                self._notes.append(f"checkpoint {url} is of a later step; set aside as {aside}")
                self._later.pop()
            if not (self.folder / SUMMARY_FILE).exists():
                with suppress(StorePermissionError):
                    remove(join(self.url, SUMMARY_FILE))  # of the job before
            self._has_begun = True
        while names := self.unfinished():
            self._upload(self._checkpoints / names[-1])
            self._retain()  # also while uploads lag behind: the store does not fill up
        if is_last or time.monotonic() >= self._next_logs:
            self._upload_logs()
        self._retain()

    def unfinished(self) -> list[str]:
        """Return the names of the checkpoints here that are still to be uploaded, the newest last."""
        found = storage.checkpoints_in(self._checkpoints)
        return [path.name for path in found if not self._is_seen(path / MANIFEST_FILE)]

    def _is_seen(self, path: Path) -> bool:
        return self._seen.get(path) == _version(path)

    def is_done(self) -> bool:
        """Return whether the store has all that is here."""
        names = {path.name for path in storage.checkpoints_in(self._checkpoints)}
        logs = map(self._is_seen, stored.logs_in(self.folder))
        return self._has_begun and not self.unfinished() and names <= self.whole and all(logs)

    def _upload(self, path: Path) -> None:
        version = _version(manifest := path / MANIFEST_FILE)
        self.whole.discard(path.name)  # another one of that step
        with copied(path, self._scratch, "store") as source:
            if source is None:  # it was deleted meanwhile
                return
            self._upload_logs()  # no checkpoint is newer than its log
            try:
                self.known[path.name] = stored.put(source, join(self._stored, path.name), self.claim.check)
                self.whole.add(path.name)
                self._retained = []
            except (CorruptCheckpoint, EnvironmentFault) as error:
                if path.exists():
                    self._notes.append(f"checkpoint {path} is damaged and is not uploaded: {error}")
        self._seen[manifest] = version

    def _upload_logs(self) -> None:
        for path in stored.logs_in(self.folder):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                if self._seen.get(path) != (version := _version(path)):
                    self.claim.check()
                    upload(path, join(self.url, path.relative_to(self.folder).as_posix()))
                    self._seen[path] = version
        self._next_logs = time.monotonic() + _LOG_SECONDS

    def _retain(self) -> None:
        """Delete checkpoints in the store that need not be kept, as enough newer ones are whole there."""
        here = [path.name for path in storage.checkpoints_in(self._checkpoints)]
        if self._keep_last is None or here == self._retained:
            return
        self._look()  # also at what a job wrote that was cut off and came back
        newest = [one for one, manifest in self.known.items() if manifest][-self._keep_last :]
        if len(newest) < self._keep_last:
            return
        best = self._goal and self._goal.best_of(self.values(self._goal.metric))
        try:
            for one in stored.names_in(self._stored):
                if storage.step_of(one) < storage.step_of(newest[0]) and one not in (best, *here):
                    self.claim.check()
                    stored.delete(join(self._stored, one))
                    self.whole.discard(one)
        except StorePermissionError as error:
            self._notes.append(f"{error.problem}; older checkpoints stay in the store")
            self._keep_last = None
        self._retained = here

    def left_out(self) -> list[str]:
        """Return what lies in the working copy and not in the store, such as links."""
        whole = {self._checkpoints / one for one in self.whole}
        left = (path for path in stored.files_in(self.folder) if path not in self._seen)
        return [str(path.relative_to(self.folder)) for path in left if path.parent not in whole]

    @property
    def lost(self) -> str:
        """Why nothing is uploaded any more: another job has the run directory; empty otherwise."""
        return self.claim.lost

    @property
    def failing_seconds(self) -> float:
        """For how long nothing could be uploaded."""
        return max(0.0, time.monotonic() - self._failing_since)

    def notes(self) -> list[str]:
        """Return what the user should know since the last call."""
        found = self._notes[:]
        del self._notes[: len(found)]
        return found

    def flush(self, limits: Callable[[], tuple[float, float]], say: Callable[[str], None]) -> bool:
        """Wait until all that was written is whole in the store; return whether it is."""
        if self._has_given_up:
            return False
        self._wanted += 1
        self._wake.set()
        began = said = failing = time.monotonic()
        while self._done < self._wanted:
            ACTIVITY.progress()
            now = time.monotonic()
            failing = failing if self._problem else now
            if self.lost or now - failing > limits()[0] or now - began > limits()[1]:
                self._has_given_up = True
                break
            if now - said > _SAY_SECONDS:
                said = now
                say(f"uploading to {shown(self.url)}{f' ({self._problem})' if self._problem else ''}")
            time.sleep(0.05)
        for text in self.notes():
            say(text)
        return self._done == self._wanted

    def close(self, seconds: float) -> bool:
        """End the uploads within this time, and let other jobs have it; return whether the store has all."""
        if self._is_over.is_set():
            return True
        seconds = min(seconds, _FEW_SECONDS) if self._has_given_up else seconds
        self._has_given_up = False
        if self._thread is not None:
            self.flush(lambda: (seconds, seconds), self._notes.append)
        self._is_over.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(1.0)
            if self._thread.is_alive():  # it may still write
                return False
        with suppress(OSError):
            self.claim.release()
        return self._thread is None or self.is_done()

    def newest_whole(self) -> str | None:
        """Return the URL of the newest checkpoint here that is whole in the store."""
        newest = max(self.whole.copy(), key=storage.step_of, default=None)
        return newest and join(self._stored, newest)

    def problem(self) -> str:
        """Return why not all that was written is in the store."""
        reason = self.lost or self._problem or "it was not uploaded in time"
        return f"not all of the run is in {shown(self.url)}: {reason}"


def _version(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written again, or another takes its place; zeros without one."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns
