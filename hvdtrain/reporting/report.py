"""The report: what the loop and the job tell of a run, passed on to its callbacks."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.backends.base import StepMetrics
from hvdtrain.callbacks import RunContext
from hvdtrain.metric_names import LINE_FIELDS
from hvdtrain.metrics import StepInfo
from hvdtrain.printable import printable
from hvdtrain.reporting.console import Console
from hvdtrain.reporting.dispatch import Dispatcher
from hvdtrain.reporting.reporters import JsonlLog, SummaryFile, TensorBoard
from hvdtrain.reporting.run_folder import RunFolder
from hvdtrain.reporting.summary import Summary

if TYPE_CHECKING:
    import rich.console

METRICS_FILE, SUMMARY_FILE = "metrics.jsonl", "summary.json"


class Report(Protocol):
    """What the loop and the job tell of a run. Every rank has one, and calls it in the main thread.

    Every method that calls hooks may raise ``WorkerFailure``, if a user's callback fails.

    Attributes:
        folder: the run directory as rank 0 opened it; None if this report writes nothing.
    """

    folder: RunFolder | None

    def say(self, text: str) -> None:
        """Show text on rank 0's console."""
        ...

    def note(self, text: str) -> None:
        """Show something that the user should know, such as a warning, on rank 0's console."""
        ...

    def status(self, text: str) -> None:
        """Show what the run does until its next step, if rank 0's console has a progress bar."""
        ...

    def on_start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Start the clock and call the callbacks' ``on_start``.

        Args:
            steps: number of steps of the whole training.
            done: steps that were done before this process started.
            seconds_before: the time that they took.
        """
        ...

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Report a step."""
        ...

    def on_window(
        self,
        step: StepInfo,
        means: Mapping[str, float],
        samples_per_second: float,
        data_wait_fraction: float = 0.0,
        busy: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Report a logged window of training.

        Args:
            step: its last step.
            means: name to mean over the window's samples.
            samples_per_second: throughput of all workers together.
            data_wait_fraction: share of the window's time in which its steps waited for data.
            busy: what is known of how long each worker was busy, by name.
        """
        ...

    def on_evaluation(self, step: StepInfo, means: Mapping[str, float], samples_per_second: float) -> None:
        """Report an evaluation."""
        ...

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Report that a checkpoint is complete on the disk."""
        ...

    def on_end(self, summary: Summary) -> None:
        """Report how training ended: write the summary and show the result."""
        ...

    def seconds(self) -> float:
        """Return the seconds spent training."""
        ...

    def sync(self) -> None:
        """Wait until what was logged is on the disk. May be called in another thread."""
        ...

    def write_summary(self, summary: Summary) -> None:
        """Write how the run stands. May be called in another thread."""
        ...

    def close(self) -> None:
        """Close files and the progress bar."""
        ...


class SilentReport:
    """A report without callbacks: it shows nothing and writes nothing."""

    def __init__(self) -> None:
        self.folder: RunFolder | None = None
        self._started_seconds = time.perf_counter()

    def say(self, text: str) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def status(self, text: str) -> None:
        """Show nothing."""

    def on_start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Start the clock."""
        self._started_seconds = time.perf_counter() - seconds_before

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Do nothing."""

    def on_window(
        self,
        step: StepInfo,
        means: Mapping[str, float],
        samples_per_second: float,
        data_wait_fraction: float = 0.0,
        busy: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Do nothing."""

    def on_evaluation(self, step: StepInfo, means: Mapping[str, float], samples_per_second: float) -> None:
        """Do nothing."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Do nothing."""

    def on_end(self, summary: Summary) -> None:
        """Do nothing."""

    def seconds(self) -> float:
        """Return the seconds spent training."""
        return time.perf_counter() - self._started_seconds

    def sync(self) -> None:
        """Do nothing: nothing was written."""

    def write_summary(self, summary: Summary) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class CallbackReport(SilentReport):
    """A report that passes on what it is told to callbacks. On other ranks than 0 it shows nothing itself.

    Args:
        context: what callbacks can use of the run; the report adds steps, functions and the clock.
        callbacks: those that this rank calls, in order.
        built_in: those that come before them and need no ``on_start``.
    """

    def __init__(self, context: RunContext, callbacks: Sequence[Any], built_in: Sequence[Any] = ()) -> None:
        super().__init__()
        self._context = replace(context, note=self.note, log=self._log, seconds=self.seconds)
        self._dispatcher = Dispatcher(callbacks, self._note_failure, built_in)

    def on_start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Start the clock and call the callbacks' ``on_start``."""
        super().on_start(steps, done, seconds_before)
        self._dispatcher.start(replace(self._context, steps=steps, steps_done=done))

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
    ) -> None:
        """Report a logged window of training."""
        rates = {
            "learning_rate": step.learning_rate,
            "samples_per_second": samples_per_second,
            "data_wait_fraction": round(data_wait_fraction, 6),
            **busy,
        }
        self._dispatcher.call("on_window", step, {**means, **rates})

    def on_evaluation(self, step: StepInfo, means: Mapping[str, float], samples_per_second: float) -> None:
        """Report an evaluation."""
        rates = {"learning_rate": step.learning_rate, "samples_per_second": samples_per_second}
        self._dispatcher.call("on_evaluation", step, {**means, **rates})

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Report that a checkpoint is complete on the disk."""
        self._dispatcher.call("on_checkpoint", step, path)

    def on_end(self, summary: Summary) -> None:
        """Report how training ended."""
        self._dispatcher.end(summary)

    def _log(self, step: StepInfo, values: Mapping[str, float]) -> None:
        """Write a callback's numbers; rank 0 does."""

    def _note_failure(self, text: str) -> None:
        print(printable(f"note: rank {self._context.rank}: {text}"), file=sys.stderr, flush=True)


class RunReport(CallbackReport):
    """The report of rank 0: console, metrics.jsonl, TensorBoard events, summary.json, then users' callbacks.

    Args:
        console: rich's console for the terminal or the output.
        context: what callbacks can use of the run; its run directory exists.
        resumed_step: steps done, if the run resumed in this directory.
        callbacks: users' callbacks, in order.
        on_made_anew: called with the run directory if it was removed and is made anew.

    Raises:
        OSError: If a file cannot be opened.
    """

    def __init__(
        self,
        console: "rich.console.Console",
        context: RunContext,
        resumed_step: int | None = None,
        callbacks: Sequence[Any] = (),
        on_made_anew: Callable[[Path], None] = lambda path: None,
    ) -> None:
        run_dir = context.run_dir
        folder = RunFolder(run_dir, on_made_anew)
        self._console = Console(console, run_dir)
        self._metrics = JsonlLog(run_dir / METRICS_FILE, self.note, folder)
        self._events = TensorBoard(run_dir, resumed_step, self.note, folder)
        self._summary = SummaryFile(SUMMARY_FILE, self.note, folder)
        built_in = (self._metrics, self._events, self._summary, self._console)
        super().__init__(context, callbacks, built_in)
        self.folder = folder

    def say(self, text: str) -> None:
        """Show text."""
        self._console.say(text)

    def note(self, text: str) -> None:
        """Show something that the user should know."""
        self._console.note(text)

    def status(self, text: str) -> None:
        """Show what the run does until its next step."""
        self._console.status(text)

    def sync(self) -> None:
        """Wait until what was logged is on the disk."""
        self._metrics.sync()

    def write_summary(self, summary: Summary) -> None:
        """Write how the run stands."""
        self._summary.write(summary)

    def close(self) -> None:
        """Close files and the progress bar."""
        self._console.close()
        self._metrics.close()
        self._events.close()
        if self.folder is not None:
            self.folder.close()

    def _log(self, step: StepInfo, values: Mapping[str, float]) -> None:
        if not LINE_FIELDS.isdisjoint(values):
            names = ", ".join(sorted(LINE_FIELDS & set(values)))
            raise ValueError(f"log(): {names} are names that every line of metrics.jsonl has; use others")
        # numbers of numpy and of the frameworks become Python's
        values = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        self._metrics.write("callback", step, values)
        self._events.write("callback", step, values)

    def _note_failure(self, text: str) -> None:
        self.note(text)
