"""The report: what the loop and the job report about a run, passed on to its callbacks."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.backends.workers import peer_errors
from hvdtrain.callbacks import CALLBACK, EVAL, EVENT, TRAIN, RunContext, Summary, hook_of, name_of
from hvdtrain.errors import ENDINGS, HvdtrainError, PeerLostError, WorkerFailure
from hvdtrain.host.launcher import is_muted
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.console import Console
from hvdtrain.reporting.records import RecentRecords, WorkersChange, logged_values
from hvdtrain.storage.text import printable
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.user_errors import where_raised


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
        with suppress(OSError):  # it is closed
            moved = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            return moved if self._is_at(moved) else None
        return None

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


Values = Mapping[str, float]
NO_VALUES: Values = MappingProxyType({})
METRICS_FILE, SUMMARY_FILE, PROVENANCE_FILE = "metrics.jsonl", "summary.json", "provenance.jsonl"


def call_hook(callback: Any, hook: str, *args: Any) -> Any:
    """Return what a method of a callback returns; WorkerFailure names the callback if it fails."""
    try:
        with peer_errors():
            return getattr(callback, hook)(*args)
    except (PeerLostError, *ENDINGS):
        raise
    except BaseException as error:
        problem = f"callback {name_of(callback)} failed in {hook}: {where_raised(error)}"
        raise WorkerFailure(problem) from error


class Report:
    """What the loop and the job report of a run, passed on to callbacks. Every rank has one.

    This one shows and writes nothing itself, and keeps the last records. Its methods are called in the main
    thread, and raise ``WorkerFailure`` if a user's callback fails. Callbacks need a ``context``, to which the
    report adds steps, functions and the clock; those that are ``built_in`` are called before the user's.
    """

    def __init__(
        self, context: RunContext | None = None, callbacks: Sequence[Any] = (), built_in: Sequence[Any] = ()
    ) -> None:
        # the run directory as rank 0 opened it; None if this report writes nothing
        self.folder: RunFolder | None = None
        self._console: Console | None = None  # that of rank 0
        self.recent = RecentRecords()  # the last records of the run, which every rank keeps
        self._started_seconds = time.perf_counter()
        self._clock_is_set = False
        self._context = context and replace(context, note=self.note, log=self._log, seconds=self.seconds)
        self._steps_done: int | None = None
        self._built_in = built_in
        self._waiting = list(callbacks)  # those that are not started
        self._called = list(built_in)  # those whose hooks are called
        self._known = set[int]()  # of those that wait, the ids of those whose ``on_start`` was called before
        self._has_ended = False

    def say(self, text: str, indent: int = 0) -> None:
        """Show text on rank 0's console; long lines continue at a column if ``indent`` is given."""
        if self._console is not None:
            self._console.say(text, indent)

    def note(self, text: str) -> None:
        """Show something that the user should know, such as a warning, on rank 0's console."""
        if self._console is not None:
            self._console.note(text)

    def status(self, text: str) -> None:
        """Show what the run does until its next step, if rank 0's console has a progress bar."""
        if self._console is not None:
            self._console.status(text)

    def on_start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Start the clock and call the callbacks' ``on_start``."""
        if not self._clock_is_set:
            self.set_clock(seconds_before)
        if self._context is not None:
            self._context.steps = steps
            self._context.steps_done = done if self._steps_done is None else self._steps_done
            for callback in self._built_in:
                self._call(callback, "on_start", self._context)
        while self._context is not None and self._waiting:
            if id(self._waiting[0]) not in self._known:
                self._call(self._waiting[0], "on_start", self._context)
            # not before: a collective in its on_start may fail, and it is called again
            self._called.append(self._waiting.pop(0))

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Report a step."""
        self._call_all("on_step", step, metrics)

    def on_window(self, step: StepInfo, means: Values, speed: float, more: Values = NO_VALUES) -> None:
        """Report a logged window of training, whose last step is given, with ``more`` that was measured."""
        rates = {"learning_rate": step.learning_rate, "samples_per_second": speed}
        self._keep(TRAIN, step, values := {**means, **rates, **more})
        self._call_all("on_window", step, values)

    def on_evaluation(self, step: StepInfo, means: Values, speed: float, more: Values = NO_VALUES) -> None:
        """Report an evaluation after a step; see ``on_window``."""
        rates = {"learning_rate": step.learning_rate, "samples_per_second": speed}
        self._keep(EVAL, step, values := {**means, **rates, **more})
        self._call_all("on_evaluation", step, values)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Report that a checkpoint is complete on the disk."""
        self._call_all("on_checkpoint", step, path)

    def on_change(self, step: StepInfo, change: WorkersChange, steps: int) -> None:
        """Report that an elastic job continues with other workers, and how many steps it has now."""
        self._keep(EVENT, step, change.values())

    def on_workers_changed(self, rank: int, workers: int) -> None:
        """Tell callbacks that the workers of an elastic job changed, and this worker's rank among them."""
        if self._context is not None:
            self._context.rank, self._context.workers = rank, workers
            self._call_all("on_workers_changed", self._context)

    def on_end(self, summary: Summary) -> None:
        """Report how training ended, once, to all callbacks, whether or not one of them fails."""
        if self._has_ended:
            return
        self._has_ended = True
        failures = []
        for callback in self._called:
            try:
                self._call(callback, "on_end", summary)
            except HvdtrainError as error:
                failures.append(error)
        if failures and summary.status == "completed":
            raise failures[0]
        for failure in failures:
            if self._console is not None:
                self.note(failure.problem)
            elif not is_muted():
                rank = self._context.rank if self._context is not None else 0
                print(printable(f"note: rank {rank}: {failure.problem}"), file=sys.stderr, flush=True)

    def seconds(self) -> float:
        """Return the seconds spent training."""
        return time.perf_counter() - self._started_seconds

    def set_clock(self, seconds: float) -> None:
        """Take over the clock of another report, by which so many seconds were spent training."""
        self._started_seconds = time.perf_counter() - seconds
        self._clock_is_set = True

    def go_on_from(self, report: "Report", steps: int, done: int) -> None:
        """Take the place of this worker's report until now, whose rank was another."""
        self.recent = report.recent
        self.set_clock(report.seconds())
        if (new := self._context) is not None and (old := report._context) is not None:
            self._known = report._known | set(map(id, report._called))
            if report._has_ended:  # no callback is called that the other report has started
                self._waiting = [callback for callback in self._waiting if id(callback) not in self._known]
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

    def _log(self, step: StepInfo, values: Mapping[str, Any]) -> None:
        """Keep what a callback logs; rank 0 writes it."""
        line, images = logged_values(step.step, values)
        self._write_images(images)
        self._keep(CALLBACK, step, line)

    def _write_images(self, images: Mapping[str, bytes]) -> None:
        """Write PNG files into the run directory, if this is rank 0's report."""

    def _keep(self, phase: str, step: StepInfo, values: Mapping[str, Any]) -> dict[str, Any]:
        begin = {"phase": phase, "step": step.step, "samples": step.samples, "epoch": round(step.epoch, 6)}
        record = {**begin, **values, "workers": step.workers, "seconds": round(self.seconds(), 4)}
        self.recent.append(record)
        return record

    def _call_all(self, hook: str, *args: Any) -> None:
        """Call a hook of every callback that has it; nothing after ``on_end``."""
        lost: PeerLostError | None = None
        for callback in () if self._has_ended else self._called:
            try:
                self._call(callback, hook, *args)
            except PeerLostError as error:
                lost = lost or error
        if lost is not None:
            raise lost

    def _call(self, callback: Any, hook: str, *args: Any) -> None:
        if hook_of(callback, hook) is None:
            return
        if not ACTIVITY.is_of_this_thread or any(callback is one for one in self._built_in):
            call_hook(callback, hook, *args)
            return
        # a user's callback may take long, which the watch of the workers is shown
        step = ACTIVITY.current.step
        with ACTIVITY.during(f"in {hook} of {name_of(callback)}" + (" after step" if step else ""), step):
            call_hook(callback, hook, *args)


def report_of_others(context: RunContext, callbacks: Sequence[Any]) -> Report:
    """Return the report of another rank than 0, which calls the callbacks of every rank."""
    own = [callback for callback in callbacks if getattr(callback, "every_rank", False)]
    return Report(context, own) if own else Report()
