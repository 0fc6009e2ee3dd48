"""Saving into a run directory at a URL: written to the working copy, uploaded while training continues."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints.remote.run_store import RunStore
from hvdtrain.checkpoints.saver import BackgroundSaver
from hvdtrain.reporting.report import Report
from hvdtrain.storage.urls import shown
from hvdtrain.stores.log_files import never_uploaded

_FEW_SECONDS = 2.0  # for what is left if the job has waited for it in vain
_FAILING_SECONDS = 120.0  # after which on_save_error: stop stops a job whose store does not answer


class UploadingSaver(BackgroundSaver):
    """The saver of rank 0 if the run directory is at a URL.

    Args:
        folder: where checkpoints lie in the working copy.
        report: where to say what a person should know.
        store: the run directory.
        stop_on_error: whether training should stop if a checkpoint cannot be written, or the store does not
            answer for long.
        options: as ``BackgroundSaver`` takes them.
    """

    def __init__(
        self, folder: Path, report: Report, store: RunStore, *, stop_on_error: bool = False, **options: Any
    ) -> None:
        super().__init__(folder, report, stop_on_error=stop_on_error, **options)
        self._store = store
        self._stops = stop_on_error
        self._has_given_up = False

    def poll(self) -> bool:
        """Report what was written or went wrong since the last call; return whether to stop for it."""
        stop = super().poll()
        if self.is_in_own_thread:
            for text in self._store.notes():
                self._report.note(text)
        if self._store.state.lost and not self.replaced:
            self.replaced = self._store.state.lost
        return stop or bool(self.replaced) or (self._stops and self._fails())

    def _fails(self) -> bool:
        return self._store.state.failing_seconds > _FAILING_SECONDS

    def publish(self, limits: Callable[[], tuple[float, float]]) -> str:
        """Wait until what was written is whole in the store; return why it is not."""
        if not self._has_given_up and self._store.flush(limits, self._report.note):
            return ""
        self._has_given_up = True
        return self._store.problem()

    def published(self) -> tuple[str | None, str | None]:
        """Return the newest checkpoint in the store, and why the newest one here is not there."""
        self._store.refresh()
        found = self._store.newest()
        if self.newest is None or self.newest.name in self._store.state.whole:
            return found, None
        return found, f"{self._store.problem()}; {self.newest} has the state of its step"

    def close(self, seconds: float) -> str:
        """End the uploads; return what the user should know, or nothing."""
        if not self._store.is_open:
            return ""
        if self._store.close(_FEW_SECONDS if self._has_given_up else seconds):
            if not self.is_complete:
                return ""
            if kept := never_uploaded(self._store.folder):
                return f"{self._store.folder} stays, as these are not in the store: {', '.join(kept[:4])}"
            shutil.rmtree(self._store.folder, ignore_errors=True)
            return ""
        where = f"{self._store.folder} on this host has all of it; the same command with --resume uploads it"
        return f"{self._store.problem()}; {where} to {shown(self._store.url)}"
