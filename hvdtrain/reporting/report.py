"""The report: what the loop and the job report about a run, passed on to its callbacks."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.callbacks import EVAL, EVENT, TRAIN, Summary
from hvdtrain.early_stopping import BAD_SAMPLES
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.records import RecentRecords, WorkersChange, record_of


class RunFolder:
    """The run directory of a job, which is open as long as the job runs.

    If it is removed, it is made anew. Another one of its name may be another job's: nothing is written to it.
    Its methods may be called in any thread.
    """

    def __init__(
        self,
        path: Path,
        on_made_anew: Callable[[Path], None] = lambda path: None,
        lost_lease: Callable[[], str] = lambda: "",
        lost_lock: Callable[[], str] = lambda: "",
    ) -> None:
        self.replaced = ""  # what happened to the directory, if another one has its name; empty otherwise
        self.lost_lease, self.lost_lock = lost_lease, lost_lock
        self._path = path
        self._on_made_anew = on_made_anew
        self._lock = threading.Lock()
        self._notes: list[str] = []
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check(self) -> Path | None:
        """Look whether the directory is still in its place, and make it anew if there is none.

        Returns where to write: the directory's path, or the one that it was moved to if another has its name;
        None if it was removed and another has its name, or if this process may not write.
        """
        if not self.may_write():
            return None
        with self._lock:
            try:
                if not self.replaced and not self._is_at(self._path):
                    self._make_anew()
            except OSError:  # no decision: writing will tell
                return self._path
            if not self.replaced:
                return self._path
            moved = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            return moved if self._is_at(moved) else None

    def may_write(self) -> bool:
        """Return whether this process may write files now."""
        return not (self.lost_lease() or self.lost_lock())

    def why_not(self) -> str:
        """Return why ``check`` gives no place to write to; empty if it gives one."""
        return self.lost_lease() or self.lost_lock() or self.replaced

    def take_notes(self) -> list[str]:
        """Return what to report to the user since the last call."""
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Close the directory."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _is_at(self, path: Path) -> bool:
        try:
            there = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def _make_anew(self) -> None:
        """Make the directory anew, or take an empty one that has its name."""
        try:
            self._path.mkdir(parents=True)  # other threads may write into it at once
        except FileExistsError:
            if any(self._path.iterdir()):
                self.replaced = f"the run directory {self._path} was replaced by another one while training"
                return
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._on_made_anew(self._path)
        self._notes.append(
            f"the run directory {self._path} was removed while training; it is made anew, without the "
            "checkpoints that it had"
        )


METRICS_FILE, SUMMARY_FILE, PROVENANCE_FILE = "metrics.jsonl", "summary.json", "provenance.jsonl"


class Report:
    """What the loop and the job report of a run. Every rank has one, and calls it in the main thread.

    This one keeps records alone: it has no callbacks, shows nothing and writes nothing.

    Every method that calls hooks may raise ``WorkerFailure``, if a user's callback fails.
    """

    def __init__(self) -> None:
        # the run directory as rank 0 opened it; None if this report writes nothing
        self.folder: RunFolder | None = None
        self.recent = RecentRecords()  # the last records of the run, which every rank keeps
        self._started_seconds = time.perf_counter()
        self._clock_is_set = False

    def say(self, text: str) -> None:
        """Show text on rank 0's console."""

    def note(self, text: str) -> None:
        """Show something that the user should know, such as a warning, on rank 0's console."""

    def status(self, text: str) -> None:
        """Show what the run does until its next step, if rank 0's console has a progress bar."""

    def on_start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Start the clock and call the callbacks' ``on_start``."""
        if not self._clock_is_set:
            self.set_clock(seconds_before)

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Report a step."""

    def on_window(
        self,
        step: StepInfo,
        means: Mapping[str, float],
        samples_per_second: float,
        data_wait_fraction: float = 0.0,
        busy: Mapping[str, float] = MappingProxyType({}),
        *,
        bad_samples: int = 0,
        measured: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Report a logged window of training."""
        rates = {
            "learning_rate": step.learning_rate,
            "samples_per_second": samples_per_second,
            "data_wait_fraction": round(data_wait_fraction, 6),
            **busy,
            **measured,
            **_skipped(bad_samples),
        }
        self._take_window(step, {**means, **rates})

    def on_evaluation(
        self,
        step: StepInfo,
        means: Mapping[str, float],
        samples_per_second: float,
        bad_samples: int = 0,
        *,
        measured: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Report an evaluation."""
        rates = {
            "learning_rate": step.learning_rate,
            "samples_per_second": samples_per_second,
            **measured,
            **_skipped(bad_samples),
        }
        self._take_evaluation(step, {**means, **rates})

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Report that a checkpoint is complete on the disk."""

    def on_change(self, step: StepInfo, change: WorkersChange, steps: int) -> None:
        """Report that an elastic job continues with other workers."""
        self._keep(EVENT, step, change.values())

    def on_workers_changed(self, rank: int, workers: int) -> None:
        """Tell callbacks that the workers of an elastic job changed, and this worker's rank among them."""

    def on_end(self, summary: Summary) -> None:
        """Report how training ended: write the summary and show the result."""

    def seconds(self) -> float:
        """Return the seconds spent training."""
        return time.perf_counter() - self._started_seconds

    def set_clock(self, seconds: float) -> None:
        """Take over the clock of another report: so many seconds were spent training until now."""
        self._started_seconds = time.perf_counter() - seconds
        self._clock_is_set = True

    def go_on_from(self, report: "Report", steps: int, done: int) -> None:
        """Take the place of this worker's report until now, whose rank was another.

        Callbacks that were notified of the start of training are not notified again.
        """
        self.recent = report.recent
        self.set_clock(report.seconds())

    def sync(self) -> None:
        """Wait until what was logged is on the disk. May be called in another thread."""

    def write_summary(self, summary: Summary) -> None:
        """Write how the run stands. May be called in another thread."""

    def close(self) -> None:
        """Close files and the progress bar."""

    def _take_window(self, step: StepInfo, values: Mapping[str, float]) -> None:
        self._keep(TRAIN, step, values)

    def _take_evaluation(self, step: StepInfo, values: Mapping[str, float]) -> None:
        self._keep(EVAL, step, values)

    def _keep(self, phase: str, step: StepInfo, values: Mapping[str, Any]) -> None:
        self.recent.add(record_of(phase, step, values, self.seconds()))


def _skipped(bad_samples: int) -> dict[str, int]:
    return {BAD_SAMPLES: bad_samples} if bad_samples else {}
