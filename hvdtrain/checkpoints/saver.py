"""Saving while training continues: what is saved when, in the background, and what is kept."""

import contextlib
import errno
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.backends.base import Backend, PendingState
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.reporting.report import Report
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import waiting_for_rank_zero

if TYPE_CHECKING:
    from hvdtrain.checkpoints.remote.run_store import RunStore

_FAILING_SECONDS = 120.0  # after which on_save_error: stop stops a job whose store does not answer
_REPORTED_WAIT_SECONDS = 0.1
_WRITING = "finishing an earlier save"
_LOOK_SECONDS = 1.0


class _NotFiniteError(Exception):
    """A state has a parameter that is not finite."""


class Saver:
    """Writes checkpoints as the loop says. Every rank has one; this one writes nothing."""

    def __init__(self) -> None:
        self.newest: Path | None = None  # the newest one that was written, or that training started from
        self.failures: list[str] = []  # what could not be written, and why
        self.not_finite = ""  # which parameter of a state is not finite: such a state is not written
        self.replaced = ""  # what happened to the run directory, if another directory has its name
        self.store: RunStore | None = None  # what uploads a run directory at a URL

    def save(self, backend: Backend, manifest: Manifest) -> None:
        """Collective. Copy the state off the device; rank 0 writes it in the background."""
        with waiting_for_rank_zero(backend.workers, _WRITING):
            pass
        backend.gather_state()

    def poll(self) -> bool:
        """Report what was written or went wrong since the last call; return whether to stop for it."""
        return False

    def finish(self, timeout_seconds: float | None = None) -> None:
        """Wait until what is being written is written."""

    def best(self) -> Path | None:
        """Return the best checkpoint that is kept; None if none is wanted. Local: rank 0 knows."""
        return None


class BackgroundSaver(Saver):
    """The saver of rank 0: one thread writes while training continues, one checkpoint at a time."""

    def __init__(
        self,
        folder: Path,
        report: Report,  # the writing thread calls its ``sync`` alone; who calls ``finish`` may note
        *,
        keep_last: int | None = 1,
        best: MetricGoal | None = None,
        stop_on_error: bool = False,
        newest: Path | None = None,  # the good one that training started from
        values: Mapping[Path, float | None] | None = None,  # of the best metric, of those that are there
        parameters: Sequence[str] = (),  # which must be finite
        store: "RunStore | None" = None,
    ) -> None:
        super().__init__()
        self.newest, self.store = newest, store
        self._folder, self._report = folder, report
        self._keep_last, self._best, self._stop_on_error = keep_last, best, stop_on_error
        self._values, self._parameters = dict(values or {}), list(parameters)
        self._thread: threading.Thread | None = None
        self._taking = threading.Lock()  # the watch of the workers waits for a checkpoint, too
        self._step = 0
        self._outcome: Path | Exception | None = None
        self._reported: tuple[object, ...] | None = None
        self._written: list[tuple[int, Path]] = []  # and not reported yet
        self._owner = threading.get_ident()

    def save(self, backend: Backend, manifest: Manifest) -> None:
        """Collective. Copy the state off the device and write it in the background."""
        with waiting_for_rank_zero(backend.workers, _WRITING):
            self._wait(f"step {manifest.step:,}")
        pending = backend.gather_state(self._folder)
        assert pending is not None  # this is rank 0
        self._step, arguments = manifest.step, (pending, manifest)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True, name="save")
        self._thread.start()

    def poll(self) -> bool:
        """Report what was written or went wrong since the last call; return whether to stop for it."""
        with self._taking:
            thread = self._thread
            if thread is not None and not thread.is_alive():
                thread.join()
                self._thread = None
                self._take_outcome()
        if self._report.folder is not None:
            self.replaced = self._report.folder.replaced or self._report.folder.lost_lock()
        if threading.get_ident() == self._owner:  # which may call the report
            written, self._written = self._written, []
            for step, path in written:
                self._report.on_checkpoint(step, path)
            for text in self.store.notes() if self.store is not None else ():
                self._report.note(text)
        is_failing = bool(self.failures)
        if self.store is not None:
            self.replaced = self.replaced or self.store.lost
            is_failing |= self.store.failing_seconds > _FAILING_SECONDS
        return bool(self.not_finite or self.replaced) or (self._stop_on_error and is_failing)

    def finish(self, timeout_seconds: float | None = None) -> None:
        """Wait until what is being written is written."""
        with contextlib.suppress(FileNotFoundError):  # which the end of the job reports
            self._check_folder()
        self._wait("the end", timeout_seconds)

    def _wait(self, what: str, timeout_seconds: float | None = None) -> None:
        thread = self._thread  # another thread may take it away
        if thread is not None:
            since = time.perf_counter()
            self._join(thread, timeout_seconds)
            waited_seconds = time.perf_counter() - since
            which = f"the checkpoint of step {self._step:,}"
            if thread.is_alive():
                self._report.note(f"{which} was not written within {waited_seconds:.1f} s")
            elif waited_seconds > _REPORTED_WAIT_SECONDS:
                self._report.note(f"{what} waited {waited_seconds:.1f} s until {which} was written")
        self.poll()

    def _join(self, thread: threading.Thread, timeout_seconds: float | None) -> None:
        """Wait for a thread that writes; as long as more gets written, that is progress for the watch."""
        if threading.get_ident() != self._owner:
            thread.join(timeout_seconds)
            return
        until_seconds = time.monotonic() + (math.inf if timeout_seconds is None else timeout_seconds)
        written_bytes = -1
        while thread.is_alive() and (left_seconds := until_seconds - time.monotonic()) > 0:
            thread.join(min(_LOOK_SECONDS, left_seconds))
            before_bytes, written_bytes = written_bytes, 0
            with contextlib.suppress(OSError):
                written_bytes = sum(path.stat().st_size for path in self._folder.glob("*/*"))
            if thread.is_alive() and written_bytes != before_bytes:
                ACTIVITY.enter("writing the checkpoint of step", self._step, is_long=True)

    def _write(self, pending: PendingState, manifest: Manifest) -> None:
        """Write one checkpoint and delete those that need not be kept; runs in the thread."""
        try:
            self._report.sync()  # no checkpoint is newer than its log
            state = pending.read()
            for name in self._parameters:
                if count := np.count_nonzero(~np.isfinite(array := state[name])):
                    raise _NotFiniteError(f"{count:,} of {array.size:,} numbers of {name} are not finite")
            self._check_folder()
            try:
                path = storage.write(self._folder, state, manifest, self._check_folder)
            except FileNotFoundError:  # the run directory was moved or removed meanwhile
                self._check_folder()
                path = storage.write(self._folder, state, manifest, self._check_folder)
        except Exception as error:
            self._outcome = error
            return
        self._outcome = path
        self._values[path] = manifest.metrics.get(self._best.metric) if self._best else None
        with contextlib.suppress(OSError):  # what cannot be deleted now is deleted after the next save
            self._retain()

    def _check_folder(self) -> None:
        """Follow a run directory that was moved."""
        if (run_folder := self._report.folder) is None:
            return
        where = run_folder.check()
        if where is None:
            raise FileNotFoundError(errno.ENOENT, run_folder.why_not())
        self._folder = where / self._folder.name

    def _retain(self) -> None:
        if self._keep_last is None:
            return
        self._check_folder()
        paths = storage.checkpoints_in(self._folder)
        storage.retain(self._folder, {*paths[-self._keep_last :], self._best_of(paths)})

    def best(self) -> Path | None:
        """Return the best checkpoint that is kept, if the store has it."""
        found = self._best_of(storage.checkpoints_in(self._folder))
        is_there = found is not None and (self.store is None or found.name in self.store.whole)
        return found if is_there else None

    def _best_of(self, paths: Sequence[Path]) -> Path | None:
        """Return the best of some checkpoints; None if none has a value, or it is not wanted."""
        values = {path: self._values.get(path) for path in paths}
        return None if self._best is None else self._best.best_of(values)

    def _take_outcome(self) -> None:
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Path):
            self.newest = outcome
            self._written.append((self._step, outcome))
            self._reported = None
            return
        if isinstance(outcome, _NotFiniteError):
            self.not_finite = f"{outcome} after step {self._step:,}"
            return
        kind, problem = (type(outcome), str(outcome)), f"{type(outcome).__name__}: {outcome}"
        if isinstance(outcome, OSError):
            where = f" ({outcome.filename})" if outcome.filename else ""
            kind, problem = (type(outcome), str(outcome.errno)), f"{outcome.strerror or outcome}{where}"
        reason = f"step {self._step:,}: {problem}"
        self.failures.append(reason)
        if kind != self._reported:  # it is reported once while it lasts; the summary has the number
            good = f"{self.newest} is whole" if self.newest else "there is no older one"
            then = "stops" if self._stop_on_error else "continues, the next save tries again"
            self._report.note(f"cannot write the checkpoint of {reason}; {good}; training {then}")
        self._reported = kind
