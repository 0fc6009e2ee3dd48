"""What a run shows and writes: the console, metrics.jsonl, TensorBoard events, summary.json."""

import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.backends.base import Totals
from hvdtrain.logs import AppendFile, finite, write_whole
from hvdtrain.metrics import StepMark
from hvdtrain.summary import Summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as ProgressBar
    from rich.progress import TaskID

_LINE_SECONDS = 5.0  # between plain lines of progress
_BAR_SECONDS = 0.1  # between updates of the bar


class Report(Protocol):
    """What the loop and the job tell about a run. Every rank has one; only rank 0's says anything."""

    def say(self, text: str) -> None:
        """Show text to a person."""
        ...

    def note(self, text: str) -> None:
        """Show something that the person should know, such as a warning."""
        ...

    def start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Begin to show progress: ``done`` of ``steps`` steps, done in ``seconds_before``."""
        ...

    def stepped(self, mark: StepMark, totals: Totals) -> None:
        """Take note of one step."""
        ...

    def trained(
        self,
        mark: StepMark,
        means: Mapping[str, float],
        samples_per_second: float,
        data_wait_fraction: float = 0.0,
    ) -> None:
        """Log a window of training."""
        ...

    def evaluated(self, mark: StepMark, means: Mapping[str, float], samples_per_second: float) -> None:
        """Log an evaluation."""
        ...

    def seconds(self) -> float:
        """Give the seconds spent training."""
        ...

    def sync(self) -> None:
        """Wait until what was logged is on the disk; may be called in another thread."""
        ...

    def write_summary(self, summary: Summary) -> None:
        """Write how the run stands."""
        ...

    def finish(self, summary: Summary) -> None:
        """Write the summary and show the result."""
        ...

    def close(self) -> None:
        """Close files and the progress bar."""
        ...


class SilentReport:
    """The report of every rank but 0: says nothing, writes nothing."""

    def __init__(self) -> None:
        self._started_seconds = time.perf_counter()

    def say(self, text: str) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Start the clock."""
        self._started_seconds = time.perf_counter() - seconds_before

    def stepped(self, mark: StepMark, totals: Totals) -> None:
        """Say nothing."""

    def trained(
        self,
        mark: StepMark,
        means: Mapping[str, float],
        samples_per_second: float,
        data_wait_fraction: float = 0.0,
    ) -> None:
        """Write nothing."""

    def evaluated(self, mark: StepMark, means: Mapping[str, float], samples_per_second: float) -> None:
        """Write nothing."""

    def seconds(self) -> float:
        """Give the seconds spent training."""
        return time.perf_counter() - self._started_seconds

    def sync(self) -> None:
        """Nothing was written."""

    def write_summary(self, summary: Summary) -> None:
        """Write nothing."""

    def finish(self, summary: Summary) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Nothing to close."""


class RunReport(SilentReport):
    """The report of rank 0.

    Args:
        console: where a person watches.
        run_dir: the run directory; exists.
        resumed_step: steps done, where the run goes on.
    """

    def __init__(self, console: "Console", run_dir: Path, resumed_step: int | None = None) -> None:
        super().__init__()
        self._console = console
        self._run_dir = run_dir
        self._metrics = AppendFile(run_dir / "metrics.jsonl")
        self._events = EventFile(run_dir, resumed_step)
        self._told_of: set[str] = set()
        self._progress = _Bar(console) if console.is_terminal else _Lines(console)

    def say(self, text: str) -> None:
        """Show text to a person."""
        self._console.print(text, highlight=False, markup=False)

    def note(self, text: str) -> None:
        """Show something that the person should know."""
        self._console.print(f"note: {text}", highlight=False, markup=False, style="yellow")

    def start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Begin to show progress."""
        super().start(steps, done, seconds_before)
        self._progress.start(steps, done)

    def stepped(self, mark: StepMark, totals: Totals) -> None:
        """Move the progress on."""
        self._progress.stepped(mark, totals)

    def trained(
        self,
        mark: StepMark,
        means: Mapping[str, float],
        samples_per_second: float,
        data_wait_fraction: float = 0.0,
    ) -> None:
        """Log a window of training."""
        values = {
            **means,
            "learning_rate": mark.learning_rate,
            "samples_per_second": samples_per_second,
            "data_wait_fraction": round(data_wait_fraction, 6),
        }
        self._write("train", mark, values)
        self._progress.trained(mark, values)

    def evaluated(self, mark: StepMark, means: Mapping[str, float], samples_per_second: float) -> None:
        """Log an evaluation."""
        values = {"learning_rate": mark.learning_rate, "samples_per_second": samples_per_second}
        self._write("eval", mark, {**means, **values})
        said = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
        self.say(f"eval  step {mark.step:>6,}  epoch {mark.epoch:6.2f}  {said}")

    def write_summary(self, summary: Summary) -> None:
        """Write how the run stands."""
        path = self._run_dir / "summary.json"
        try:
            write_json(path, summary.as_dict())
        except OSError as error:
            self._tell(path, error)

    def finish(self, summary: Summary) -> None:
        """Write the summary and show the result."""
        self._progress.stop()
        self.write_summary(summary)
        if summary.failed_saves:
            self.note(
                f"{counted(summary.failed_saves, 'checkpoint')} could not be written; "
                f"the last: {summary.save_error}; newest good one: {summary.checkpoint or 'none'}"
            )
        if summary.bad_samples:
            self.note(f"{counted(summary.bad_samples, 'sample')} could not be read and were skipped")
        if summary.status == "completed":
            final = ", ".join(f"{name} {value:.4f}" for name, value in summary.final.items())
            self.say(
                f"done: {final or 'no evaluation'}; {counted(summary.steps, 'step')} "
                f"in {summary.seconds:.1f} s, {summary.samples_per_second:,.0f} samples/s\n"
                f"run directory: {self._run_dir}\ncheckpoint: {summary.checkpoint or 'none'}"
            )
        elif summary.status == "stopped" and summary.checkpoint:
            self.say(f"checkpoint: {summary.checkpoint}; the same command with --resume goes on from it")

    def sync(self) -> None:
        """Wait until what was logged is on the disk."""
        self._metrics.sync()

    def close(self) -> None:
        """Close files and the progress bar."""
        self._progress.stop()
        self._metrics.close()
        self._events.close()

    def _write(self, phase: str, mark: StepMark, values: Mapping[str, float]) -> None:
        record = {
            "phase": phase,
            "step": mark.step,
            "samples": mark.samples,
            "epoch": round(mark.epoch, 6),
            **values,
            "workers": mark.workers,
            "seconds": round(self.seconds(), 4),
        }
        events = {f"{phase}/{name}": value for name, value in values.items()}
        self._tell(self._metrics.path, self._metrics.append((to_json(record) + "\n").encode()))
        self._tell(self._events.path, self._events.add(events, mark.step))

    def _tell(self, path: Path, error: OSError | None) -> None:
        """Say once what cannot be written; training goes on."""
        if error is not None and path.name not in self._told_of:
            self._told_of.add(path.name)
            self.note(f"cannot write {path}: {error.strerror or error}; training goes on, it is tried again")


class _Lines:
    """Progress as plain lines, where there is no terminal: the first window, then every few seconds."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._steps = 0
        self._last_seconds = float("-inf")

    def start(self, steps: int, done: int) -> None:
        self._steps = steps

    def stepped(self, mark: StepMark, totals: Totals) -> None:
        pass

    def trained(self, mark: StepMark, values: Mapping[str, float]) -> None:
        now = time.perf_counter()
        if now - self._last_seconds < _LINE_SECONDS and mark.step < self._steps:
            return
        self._last_seconds = now
        self._console.print(
            f"train step {mark.step:>6,}/{self._steps:,}  epoch {mark.epoch:6.2f}  {_in_words(values)}",
            highlight=False,
            markup=False,
        )

    def stop(self) -> None:
        pass


class _Bar:
    """Progress as a live bar at the foot of the terminal."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._bar: ProgressBar | None = None
        self._task: TaskID | None = None
        self._step = 0
        self._values = ""
        self._last_seconds = 0.0

    def start(self, steps: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}", markup=False),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            refresh_per_second=5,
        )
        self._step = done
        self._task = self._bar.add_task("train", total=steps, completed=done, values="")
        self._bar.start()

    def stepped(self, mark: StepMark, totals: Totals) -> None:
        self._step = mark.step
        now = time.perf_counter()
        if now - self._last_seconds > _BAR_SECONDS:
            self._last_seconds = now
            self._show()

    def trained(self, mark: StepMark, values: Mapping[str, float]) -> None:
        self._values = f"epoch {mark.epoch:.1f}  {_in_words(values)}"
        self.stepped(mark, Totals({}, 0.0))

    def stop(self) -> None:
        if self._bar is not None:
            self._show()  # what came since the last update
            self._bar.stop()
            self._bar = None

    def _show(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._step, values=self._values)


class EventFile:
    """A TensorBoard event file with scalars, written with TensorBoard's own record writer.

    TensorBoard's SummaryWriters load a framework to write with; this needs none.

    Args:
        folder: where the file goes.
        resumed_step: steps done, where a run goes on: readers drop what older files have of later ones.
    """

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary as SummaryProto
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, SummaryProto
        self.path = folder / f"events.out.tfevents.{int(time.time())}.{os.getpid()}.hvdtrain"
        self._file = AppendFile(self.path)
        self._buffer = io.BytesIO()
        self._writer = RecordWriter(self._buffer)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    def add(self, values: Mapping[str, float], step: int) -> OSError | None:
        """Add scalars at a step; give what went wrong, if something did."""
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        return self._write(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars))
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> OSError | None:
        self._writer.write(event.SerializeToString())
        record = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return self._file.append(record)


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Give JSON that every reader takes: null stands for a number that is not finite."""
    return json.dumps(finite(values), indent=indent, allow_nan=False)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file whole."""
    write_whole(path, to_json(values, indent=2) + "\n")


def counted(number: float, noun: str) -> str:
    """Say a number of things: "1 worker", "1,797 samples", "0.5 epochs"."""
    said = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{said} {noun}" if number == 1 else f"{said} {noun}s"


def _in_words(values: Mapping[str, float]) -> str:
    said = [
        f"{name} {value:.4f}"
        for name, value in values.items()
        if "_" not in name or name.endswith("accuracy")
    ]
    said.append(f"lr {values['learning_rate']:.3g}")
    said.append(f"{values['samples_per_second']:,.0f} samples/s")
    return "  ".join(said)
