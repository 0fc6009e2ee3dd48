"""The report: what the loop and the job report about a run, passed on to its callbacks."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.callbacks import CALLBACK, EVAL, EVENT, TRAIN, RunContext, Summary
from hvdtrain.early_stopping import BAD_SAMPLES
from hvdtrain.host.launcher import is_muted
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.dispatcher import Dispatcher
from hvdtrain.reporting.records import RecentRecords, WorkersChange, record_of
from hvdtrain.storage.text import printable


class RunFolder:
    """The run directory of a job, which is open as long as the job runs; any thread may call its methods.

    Nothing is written to another one of its name, which may be another job's. ``lost_lease`` and
    ``lost_lock`` return why this process may no longer write; nothing while it may.
    """

    def __init__(
        self,
        path: Path,
        lost_lease: Callable[[], str] = lambda: "",
        lost_lock: Callable[[], str] = lambda: "",
    ) -> None:
        self.replaced = ""  # what happened to the directory, if it is not in its place; empty otherwise
        self.lost_lease, self.lost_lock = lost_lease, lost_lock
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check(self) -> Path | None:
        """Return where to write: in the directory, which may have been moved; None for nowhere."""
        if not self.may_write():
            return None
        try:
            if not self.replaced and self._is_at(self._path):
                return self._path
        except OSError:  # no decision: writing will tell
            return self._path
        self.replaced = (
            f"the run directory {self._path} was removed or replaced by another one while training"
        )
        moved = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        return moved if self._is_at(moved) else None

    def may_write(self) -> bool:
        """Return whether this process may write files now."""
        return not (self.lost_lease() or self.lost_lock())

    def why_not(self) -> str:
        """Return why ``check`` gives no place to write to; empty if it gives one."""
        return self.lost_lease() or self.lost_lock() or self.replaced

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


METRICS_FILE, SUMMARY_FILE, PROVENANCE_FILE = "metrics.jsonl", "summary.json", "provenance.jsonl"


class Report:
    """What the loop and the job report of a run, passed on to callbacks. Every rank has one.

    This one shows and writes nothing itself, and keeps the last records. Its methods are called in the main
    thread, and raise ``WorkerFailure`` if a user's callback fails. Callbacks need a ``context``, to which the
    report adds steps, functions and the clock; those that are ``built_in`` need no ``on_start``.
    """

    def __init__(
        self, context: RunContext | None = None, callbacks: Sequence[Any] = (), built_in: Sequence[Any] = ()
    ) -> None:
        # the run directory as rank 0 opened it; None if this report writes nothing
        self.folder: RunFolder | None = None
        self.recent = RecentRecords()  # the last records of the run, which every rank keeps
        self._started_seconds = time.perf_counter()
        self._clock_is_set = False
        self._context = context and replace(context, note=self.note, log=self._log, seconds=self.seconds)
        self._steps_done: int | None = None
        self._dispatcher = Dispatcher(callbacks, self._note_failure, built_in)

    def say(self, text: str) -> None:
        """Show text on rank 0's console."""

    def note(self, text: str) -> None:
        """Show something that the user should know, such as a warning, on rank 0's console."""

    def status(self, text: str) -> None:
        """Show what the run does until its next step, if rank 0's console has a progress bar."""

    def on_start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Start the clock and call the callbacks' ``on_start``.

        ``done`` steps were done before this process started, and took ``seconds_before``.
        """
        if not self._clock_is_set:
            self.set_clock(seconds_before)
        if self._context is not None:
            self._context.steps = steps
            self._context.steps_done = done if self._steps_done is None else self._steps_done
            self._dispatcher.start(self._context)

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Report a step."""
        self._dispatcher.call("on_step", step, metrics)

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
        """Report a logged window of training, whose last step is given.

        ``data_wait_fraction`` is the share of its time in which steps waited for data, ``busy`` what is known
        of how long each worker was busy, ``measured`` what hooks of the loop have measured, by name.
        """
        values = {
            **means,
            "learning_rate": step.learning_rate,
            "samples_per_second": samples_per_second,
            "data_wait_fraction": round(data_wait_fraction, 6),
            **busy,
            **measured,
            **({BAD_SAMPLES: bad_samples} if bad_samples else {}),
        }
        self._keep(TRAIN, step, values)
        self._dispatcher.call("on_window", step, values)

    def on_evaluation(
        self,
        step: StepInfo,
        means: Mapping[str, float],
        samples_per_second: float,
        bad_samples: int = 0,
        *,
        measured: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Report an evaluation after a step; see ``on_window``."""
        values = {
            **means,
            "learning_rate": step.learning_rate,
            "samples_per_second": samples_per_second,
            **measured,
            **({BAD_SAMPLES: bad_samples} if bad_samples else {}),
        }
        self._keep(EVAL, step, values)
        self._dispatcher.call("on_evaluation", step, values)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Report that a checkpoint is complete on the disk."""
        self._dispatcher.call("on_checkpoint", step, path)

    def on_change(self, step: StepInfo, change: WorkersChange, steps: int) -> None:
        """Report that an elastic job continues with other workers, and how many steps it has now."""
        self._keep(EVENT, step, change.values())

    def on_workers_changed(self, rank: int, workers: int) -> None:
        """Tell callbacks that the workers of an elastic job changed, and this worker's rank among them."""
        if self._context is not None:
            self._context.rank, self._context.workers = rank, workers
            self._dispatcher.call("on_workers_changed", self._context)

    def on_end(self, summary: Summary) -> None:
        """Report how training ended: write the summary and show the result."""
        self._dispatcher.end(summary)

    def seconds(self) -> float:
        """Return the seconds spent training."""
        return time.perf_counter() - self._started_seconds

    def set_clock(self, seconds: float) -> None:
        """Take over the clock of another report, by which so many seconds were spent training."""
        self._started_seconds = time.perf_counter() - seconds
        self._clock_is_set = True

    def go_on_from(self, report: "Report", steps: int, done: int) -> None:
        """Take the place of this worker's report until now, whose rank was another.

        Callbacks that were notified of the start of training are not notified again.
        """
        self.recent = report.recent
        self.set_clock(report.seconds())
        if (new := self._context) is not None and (old := report._context) is not None:
            self._dispatcher.go_on_from(report._dispatcher)
            self._context = old  # which callbacks may have kept
            old.rank, old.workers = new.rank, new.workers
            old.note, old.log, old.seconds = new.note, new.log, new.seconds
            self._steps_done = old.steps_done
        self.on_start(steps, done)

    def sync(self) -> None:
        """Wait until what was logged is on the disk. May be called in another thread."""

    def write_summary(self, summary: Summary) -> None:
        """Write how the run stands. May be called in another thread."""

    def close(self) -> None:
        """Close files and the progress bar."""

    def _log(self, step: StepInfo, values: Mapping[str, float]) -> None:
        """Keep a callback's numbers; rank 0 writes them."""
        self._keep(CALLBACK, step, values)

    def _keep(self, phase: str, step: StepInfo, values: Mapping[str, Any]) -> None:
        self.recent.add(record_of(phase, step, values, self.seconds()))

    def _note_failure(self, text: str) -> None:
        if not is_muted():
            rank = self._context.rank if self._context is not None else 0
            print(printable(f"note: rank {rank}: {text}"), file=sys.stderr, flush=True)


def report_of_others(context: RunContext, callbacks: Sequence[Any]) -> Report:
    """Return the report of another rank than 0, which calls the callbacks of every rank."""
    own = [callback for callback in callbacks if getattr(callback, "every_rank", False)]
    return Report(context, own) if own else Report()
