"""Keeping a run directory at a URL as its working copy is: logs before checkpoints, manifests last."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.checkpoints import manifest as manifests
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest, copied
from hvdtrain.checkpoints.remote.begin import NEW, Begun, StoredRun, WorkingCopy, begin
from hvdtrain.checkpoints.remote.claim import Claim
from hvdtrain.checkpoints.remote.stored_checkpoints import (
    FOLDER,
    LogFiles,
    StoredCheckpoints,
    step_in,
    value_of,
)
from hvdtrain.checkpoints.storage import MANIFEST_FILE
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import EnvironmentFault
from hvdtrain.storage.urls import PATIENCE, Patience, StoreError, StorePermissionError, join, remove, shown

LOG_SECONDS = 30.0  # between uploads of logs while there are no checkpoints
_REFUSED_SECONDS = 60.0  # between attempts to delete where that fails
_MOST_SHARE = 20  # uploads of logs take at most one part in so many of the time
_SUMMARY = "summary.json"
_Version = tuple[int, int]  # of a checkpoint's manifest


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept in the store."""

    keep_last: int | None = None  # how many of the newest; None keeps all
    goal: MetricGoal | None = None  # the metric whose best one is kept, too
    spared: Sequence[str] = ()  # names of others


class Uploader:
    """Uploads a working copy while a job writes it.

    Args:
        url: the run directory.
        folder: its working copy.
        retention: which checkpoints are kept in the store.
        note: called with what the user should know.
        patience: how long requests may take.

    Attributes:
        copy: the working copy.
        claim: the job's claim on the run directory.
        whole: the checkpoints of the working copy that are whole in the store, by name, with their versions.

    Raises:
        OSError: If the working copy cannot be written.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        retention: Retention,
        note: Callable[[str], None] = lambda text: None,
        patience: Patience = PATIENCE,
    ) -> None:
        self._url, self._retention, self._note, self._patience = url, retention, note, patience
        self.copy = WorkingCopy(folder)
        self.claim = Claim(url, note)
        self.whole: dict[str, _Version] = {}
        self._stored = StoredCheckpoints(url, patience)
        self._logs = LogFiles(folder, url, self.copy.scratch, patience)
        self._manifests: dict[str, Manifest] = {}  # of what is in the store
        self._bad: dict[str, _Version] = {}
        self._tried: set[str] = set()  # what may be in the store of an upload that failed
        self._others: set[str] = set()  # what is there without a manifest that can be read
        self._passed_over: list[str] = []  # checkpoints in the store that could not be verified
        self._has_begun = self._is_new = self._is_refused = False
        self._next_logs = self._next_deletion = 0.0

    def begin(self, resume: str) -> Begun:
        """Claim the run directory and bring the working copy to where the run stands.

        It takes and raises what ``hvdtrain.checkpoints.remote.begin.begin`` and ``Claim.acquire`` do.
        """
        self.copy.lock()
        state = self.copy.state
        self.claim = Claim(self._url, self._note, ended=state.claim)
        self.claim.acquire()
        state.url, state.claim = self._url, self.claim.holder.id
        self.copy.write_state()
        run = StoredRun(self._url, self.copy, self._stored, self._logs, self._note)
        self._is_new = resume == NEW
        begun, self._manifests = begin(run, self.claim.holder.writer, resume, self._retention.goal)
        self._passed_over = begun.passed_over
        self.copy.write_state()
        return begun

    def start(self, step: int | None) -> None:
        """Begin to upload: from now on the job changes the run.

        Args:
            step: the steps done if the run continues in this directory; later checkpoints in the store
                are set aside before anything is uploaded.
        """
        state = self.copy.state
        state.writers = [*filter(None, [self.claim.holder.writer]), self.claim.holder.id]
        state.is_uploaded = False
        if step is not None:
            found = {*self._manifests, *self._passed_over}
            later = {one for one in found if step_in(one) > step}
            state.later = sorted({*state.later, *later}, key=step_in)
            for one in later:
                self._manifests.pop(one, None)
        self.copy.write_state()  # a job that begins before they are set aside does not take them

    def round(self, *, is_last: bool = False) -> None:
        """Upload what there is to upload now.

        Args:
            is_last: whether the logs are uploaded, too, whenever that was done last.

        Raises:
            StoreError: If the store does not answer, or another job has the run directory.
            OSError: If something cannot be read or written here.
        """
        self._catch_up()
        while names := self.unfinished():
            self._upload(self.copy.folder / FOLDER / names[-1])
            self._retain()  # also while uploads lag behind: the store does not fill up
        if is_last or time.monotonic() >= self._next_logs:
            self._upload_logs()
        self._retain()

    def unfinished(self) -> list[str]:
        """Return the names of the checkpoints that are here and not whole in the store, the newest last."""
        versions = {path.name: _version(path) for path in storage.checkpoints_in(self.copy.folder / FOLDER)}
        known = (self.whole.items(), self._bad.items())  # whole there, or damaged here
        return [one for one in versions if not any((one, versions[one]) in some for some in known)]

    def is_done(self) -> bool:
        """Return whether the store has all that is here."""
        return self._has_begun and not self._bad and not self.unfinished() and not self._logs.has_changed()

    def close(self) -> None:
        """Let other jobs have the run directory; raises an OSError if it cannot."""
        try:
            if self._has_begun:
                self.copy.state.is_uploaded = self.is_done()
                self.copy.write_state()
        finally:  # also if the disk is full
            try:
                self.claim.release()
            finally:
                self.copy.unlock()

    def _catch_up(self) -> None:
        """Do what comes before the first upload."""
        if not self._has_begun:
            self.claim.update(writer=self.claim.holder.id)
            self.claim.check()
            self._has_begun = True
        state = self.copy.state
        while state.later:
            name = state.later[-1]
            self.claim.check()
            new = self._stored.set_aside(name)
            self._note(f"checkpoint {shown(self._stored.url)}/{name} is of a later step; set aside as {new}")
            self._manifests.pop(name, None)
            state.later.pop()
            self.copy.write_state()
        if not self._is_new and self._next_logs == 0.0 and not (self.copy.folder / _SUMMARY).exists():
            self.claim.check()
            try:
                remove(join(self._url, _SUMMARY), self._patience)  # of the job before: the run continues
            except StorePermissionError as error:
                self._note_refused(error)

    def _upload(self, path: Path) -> None:
        version = _version(path)
        self.whole.pop(path.name, None)  # another one of that step
        with copied(path, self.copy.scratch, "store") as source:
            if source is None:  # it was deleted meanwhile
                return
            try:
                manifest = manifests.read(source / MANIFEST_FILE)
                self._upload_logs()  # no checkpoint is newer than its log
                self._tried.add(path.name)
                self._stored.put(source, path.name, self.claim.check)
            except StoreError:
                raise
            except (CorruptCheckpoint, FileNotFoundError, EnvironmentFault) as error:
                if not path.exists():  # it was deleted meanwhile
                    return
                self._bad[path.name] = version
                self._note(f"checkpoint {path} is damaged and is not uploaded: {error}")
                return
        self._manifests[path.name] = manifest
        self._tried.discard(path.name)
        if self._retention.keep_last is not None:
            self._find_strays()
        self.whole[path.name] = version

    def _find_strays(self) -> None:
        """Find what a former job that was cut off and came back has written since this one began."""
        known = {*self._manifests, *self._tried, *self._others, *self._passed_over, *self.copy.state.later}
        for name in {*self._stored.names()} - known:
            try:
                found = self._stored.manifest(name)
            except (CorruptCheckpoint, EnvironmentFault):
                found = None
            if found is None:
                self._others.add(name)
            else:
                self._manifests[name] = found

    def _upload_logs(self) -> None:
        began = time.monotonic()
        self._logs.upload(self.claim.check)
        now = time.monotonic()
        self._next_logs = now + max(LOG_SECONDS, _MOST_SHARE * (now - began))

    def _retain(self) -> None:
        """Delete checkpoints in the store that need not be kept, as enough newer ones are whole there."""
        for name in self._superfluous() if time.monotonic() >= self._next_deletion else ():
            self.claim.check()
            try:
                self._stored.delete(name)
            except StorePermissionError as error:  # what is kept is there nevertheless
                self._note_refused(error)
                self._next_deletion = time.monotonic() + _REFUSED_SECONDS
                return
            self._manifests.pop(name, None)
            self._tried.discard(name)
            self.whole.pop(name, None)

    def _superfluous(self) -> list[str]:
        """Return which checkpoints in the store need not be kept: only such as this run wrote."""
        last, goal = self._retention.keep_last, self._retention.goal
        own = {
            one: found for one, found in self._manifests.items() if found.config.get("run_dir") == self._url
        }
        names = sorted(own, key=step_in)
        if last is None or len(names) < last:
            return []
        keep = {*names[-last:], *self._retention.spared, *self.copy.steps()}
        if goal is not None:
            best = None
            for one in names:
                if goal.improves(value_of(own[one], goal), value_of(own[best], goal) if best else None):
                    best = one
            keep.add(best or names[-1])
        cut = {one for one in self._tried if step_in(one) < step_in(names[-last])} - set(self._manifests)
        return sorted({*names, *cut} - keep, key=step_in)

    def _note_refused(self, error: StoreError) -> None:
        if not self._is_refused:
            self._note(f"{error.problem}; it stays in the store, and uploads go on")
        self._is_refused = True


def _version(path: Path) -> _Version:
    """Return what changes when another checkpoint takes the place of one; zeros if it has no manifest."""
    try:
        status = (path / MANIFEST_FILE).stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns
