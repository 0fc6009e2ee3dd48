"""The built-in callbacks that write files: metrics.jsonl, TensorBoard events, summary.json.

A file that cannot be written, on a full disk for instance, does not end training: it is noted once, and
what could not be written is written with the next record.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.callbacks import EVENT, Callback, RunContext, Summary
from hvdtrain.early_stopping import LINE_FIELDS
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.event_file import EventFile, session_end, session_start, text_summary
from hvdtrain.reporting.jsonl import AppendFile, write_json
from hvdtrain.reporting.records import line_of, record_of
from hvdtrain.reporting.report import RunFolder


class _Log(Callback):
    """A built-in callback that appends windows and evaluations to a file of the run directory.

    The file is restored if it was removed, and an error of writing is noted once.
    """

    def __init__(self, file: AppendFile | EventFile, folder: RunFolder, note: Callable[[str], None]) -> None:
        self._file, self._folder, self._note = file, folder, note
        self._note_error = WriteErrors(note)

    def on_window(self, step: StepInfo, values: Mapping[str, float]) -> None:
        """Write a window."""
        self.write("train", step, values)

    def on_evaluation(self, step: StepInfo, metrics: Mapping[str, float]) -> None:
        """Write an evaluation."""
        self.write("eval", step, metrics)

    def write(self, phase: str, step: StepInfo, values: Mapping[str, Any]) -> None:
        """Write values by name."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check(self, error: OSError | None = None) -> None:
        """Restore the directory and the file if they were removed; note that, and what went wrong."""
        for is_last in (False, True):  # the directory may be removed after the first look at it
            self._folder.check()
            for text in self._folder.take_notes():
                self._note(text)
            try:  # if it was replaced, what lies at the path is not this job's
                if not self._folder.replaced and (done := self._file.restore()):
                    self._note(done)
                break
            except OSError as failed:
                if is_last or not isinstance(failed, FileNotFoundError):
                    error = failed
                    break
        self._note_error(self._file.path, error)


class JsonlLog(_Log):
    """The built-in callback that writes metrics.jsonl: one line for each window and evaluation."""

    def __init__(self, path: Path, note: Callable[[str], None], folder: RunFolder) -> None:
        self._lines = AppendFile(path, may_write=folder.may_write)
        super().__init__(self._lines, folder, note)
        self._seconds: Callable[[], float] = lambda: 0.0

    def on_start(self, context: RunContext) -> None:
        """Take the clock of the run."""
        self._seconds = context.seconds

    def on_end(self, summary: Summary) -> None:
        """Look once more whether the file is there."""
        self._check()

    def write(self, phase: str, step: StepInfo, values: Mapping[str, Any]) -> None:
        """Write a line with values by name."""
        self.append(record_of(phase, step, values, self._seconds()))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line."""
        self._check(self._lines.append(line_of(record)))

    def sync(self) -> None:
        """Wait until what was written is on the disk. May be called in another thread."""
        self._lines.sync()


class TensorBoard(_Log):
    """The built-in callback that writes a TensorBoard event file with the values of metrics.jsonl."""

    def __init__(
        self, run_dir: Path, resumed_step: int | None, note: Callable[[str], None], folder: RunFolder
    ) -> None:
        self._events = EventFile(run_dir, resumed_step, folder.may_write)
        super().__init__(self._events, folder, note)

    def write(self, phase: str, step: StepInfo, values: Mapping[str, float]) -> None:
        """Write values by name, which TensorBoard groups by the phase."""
        self._add(phase, step.step, values)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a line of metrics.jsonl."""
        values = {
            name: math.nan if value is None else value
            for name, value in record.items()
            if name not in LINE_FIELDS and (value is None or isinstance(value, int | float))
        }
        if record["phase"] == EVENT:
            values = {"workers": record["workers"], "pause_seconds": record["pause_seconds"]}
        self._add(record["phase"], record["step"], values)

    def write_config(self, config: Mapping[str, Any], text: str, step: int, name: str) -> None:
        """Write a run's config as hyperparameters and as a text, at the steps that were done before."""
        for summary in (session_start(config, name, time.time()), text_summary("config", text)):
            self._note_error(self._file.path, self._events.add_summary(summary, step))

    def write_end(self, step: int) -> None:
        """Write that the run is complete."""
        self._note_error(self._file.path, self._events.add_summary(session_end(time.time()), step))

    def _add(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        self._check(self._events.add({f"{phase}/{name}": value for name, value in values.items()}, step))


class SummaryFile(Callback):
    """The built-in callback that writes summary.json."""

    def __init__(self, name: str, note: Callable[[str], None], folder: RunFolder) -> None:
        self._name = name
        self._folder = folder
        self._note_error = WriteErrors(note)
        self._writing = threading.Lock()  # one at a time: all write next to the file under one name

    def on_end(self, summary: Summary) -> None:
        """Write how training ended."""
        self.write(summary)

    def write(self, summary: Summary) -> None:
        """Write how training stands. May be called in another thread."""
        with self._writing:
            if (path := self._folder.check()) is None:  # another job's directory has the name
                return
            try:
                write_json(path / self._name, summary.as_dict())
            except OSError as error:
                self._note_error(path / self._name, error)


class WriteErrors:
    """Notes once that a file cannot be written; ``note`` shows a line of text to the user."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._noted = False

    def __call__(self, path: Path, error: OSError | None) -> None:
        """Note the first error."""
        if error is not None and not self._noted:
            self._noted = True
            reason = error.strerror or error
            self._note(f"cannot write {path}: {reason}; training continues, it is tried again")
