"""The built-in callbacks that write files: metrics.jsonl, TensorBoard events, summary.json.

A file that cannot be written, on a full disk for instance, does not end training: it is noted once, and
what could not be written is written with the next record.
"""

import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.callbacks import EVENT, Callback, RunContext, Summary
from hvdtrain.early_stopping import LINE_FIELDS
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.event_file import EventFile
from hvdtrain.reporting.jsonl import AppendFile, write_json
from hvdtrain.reporting.records import line_of, record_of
from hvdtrain.reporting.report import RunFolder


class _Log(Callback):
    """A built-in callback that appends windows and evaluations to a file of the run directory.

    An error of writing is noted once; ``note`` shows a line of text to the user.
    """

    def __init__(self, file: AppendFile, folder: RunFolder, note: Callable[[str], None]) -> None:
        self._file, self._folder, self._note_error = file, folder, WriteErrors(note)

    def on_window(self, step: StepInfo, values: Mapping[str, float]) -> None:
        self.write("train", step, values)

    def on_evaluation(self, step: StepInfo, metrics: Mapping[str, float]) -> None:
        self.write("eval", step, metrics)

    def write(self, phase: str, step: StepInfo, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._file.close()

    def _check(self, error: OSError | None) -> None:
        """Look whether the directory is in its place, and note what went wrong."""
        self._folder.check()
        self._note_error(self._file.path, error)


class JsonlLog(_Log):
    """The built-in callback that writes metrics.jsonl: one line for each window and evaluation."""

    def __init__(self, path: Path, note: Callable[[str], None], folder: RunFolder) -> None:
        super().__init__(AppendFile(path, may_write=folder.may_write), folder, note)
        self._seconds: Callable[[], float] = lambda: 0.0

    def on_start(self, context: RunContext) -> None:
        """Take the clock of the run."""
        self._seconds = context.seconds

    def write(self, phase: str, step: StepInfo, values: Mapping[str, Any]) -> None:
        """Write a line with values by name."""
        self.append(record_of(phase, step, values, self._seconds()))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line."""
        self._check(self._file.append(line_of(record)))

    def sync(self) -> None:
        """Wait until what was written is on the disk. May be called in another thread."""
        self._file.sync()


class TensorBoard(_Log):
    """The built-in callback that writes a TensorBoard event file with the values of metrics.jsonl."""

    def __init__(
        self, run_dir: Path, resumed_step: int | None, note: Callable[[str], None], folder: RunFolder
    ) -> None:
        self._events = EventFile(run_dir, resumed_step, folder.may_write)
        super().__init__(self._events, folder, note)

    def write(self, phase: str, step: StepInfo, values: Mapping[str, float]) -> None:
        """Write values by name, which TensorBoard groups by the phase."""
        named = {f"{phase}/{name}": value for name, value in values.items()}
        self._check(self._events.add(named, step.step))

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a line of metrics.jsonl."""
        values = {
            name: math.nan if value is None else value
            for name, value in record.items()
            if name not in LINE_FIELDS and (value is None or isinstance(value, int | float))
        }
        if record["phase"] == EVENT:
            values = {"workers": record["workers"], "pause_seconds": record["pause_seconds"]}
        named = {f"{record['phase']}/{name}": value for name, value in values.items()}
        self._check(self._events.add(named, record["step"]))

    def add(self, step: int, *summaries: Any) -> None:
        """Write summaries of the module ``event_file`` at a step."""
        for summary in summaries:
            self._check(self._events.add_summary(summary, step))


class SummaryFile(Callback):
    """The built-in callback that writes summary.json."""

    def __init__(self, name: str, note: Callable[[str], None], folder: RunFolder) -> None:
        self._name, self._folder, self._note_error = name, folder, WriteErrors(note)
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
