"""The report of rank 0, which shows and writes the run.

A file that cannot be written, on a full disk for instance, does not end training: it is noted once, and
what could not be written is written with the next record.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.callbacks import CALLBACK, EVENT, RunContext, Summary
from hvdtrain.early_stopping import LINE_FIELDS
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting import event_file
from hvdtrain.reporting.console import Console
from hvdtrain.reporting.jsonl import AppendFile, write_json, write_parts
from hvdtrain.reporting.records import IMAGES, WorkersChange, line_of
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE, Report, RunFolder
from hvdtrain.storage.files import check_link

if TYPE_CHECKING:
    import rich.console


class RunReport(Report):
    """The report of rank 0: metrics.jsonl, TensorBoard events, summary.json, console, then callbacks."""

    def __init__(
        self,
        console: "rich.console.Console",
        context: RunContext,
        resumed_step: int | None = None,
        callbacks: Sequence[Any] = (),
        *,
        lost_lease: Callable[[], str] = lambda: "",
        lost_lock: Callable[[], str] = lambda: "",
        reporters: Sequence[Any] = (),
    ) -> None:
        shown = Console(console)
        super().__init__(context, callbacks, (shown, *reporters))
        self._console: Console = shown
        self._config, run_dir = context.config, context.run_dir
        self.folder: RunFolder = RunFolder(run_dir, lost_lease, lost_lock)
        self._metrics = AppendFile(run_dir / METRICS_FILE, may_write=self.folder.may_write)
        self._events = event_file.EventFile(run_dir, resumed_step, self.folder.may_write)
        self._writing_summary = threading.Lock()  # one at a time: all write next to the file under one name
        self._not_written = set[str]()  # names of files whose error is noted
        self._reporters = reporters

    def on_start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Start the clock, call the callbacks' ``on_start``, write the config for TensorBoard."""
        super().on_start(steps, done, seconds_before)
        if "tensorboard" in self._config.track:
            text = event_file.text_summary("config", f"```yaml\n{self._config.to_yaml()}```")
            self._check(self._events.path, self._events.add_summary(text, done))

    def on_end(self, summary: Summary) -> None:
        """Report how training ended."""
        if not self._has_ended:
            self.write_summary(summary)
        super().on_end(summary)

    def on_change(self, step: StepInfo, change: WorkersChange, steps: int) -> None:
        """Report that other workers continue with an elastic job."""
        super().on_change(step, change, steps)
        self._console.on_change(change.describe(step.workers, step.step), steps)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records to the log."""
        for record in records:
            self._check(self._metrics.path, self._metrics.append(line_of(record)))

    def add_events(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the numbers of records for TensorBoard, which groups them by the phase."""
        for record in records:
            names = ("workers", "pause_seconds") if record["phase"] == EVENT else record.keys() - LINE_FIELDS
            values = {
                f"{record['phase']}/{name}": math.nan if value is None else value
                for name, value in record.items()
                if name in names and (value is None or isinstance(value, int | float))
            }
            self._check(self._events.path, self._events.add(values, record["step"]))
            for name in record.keys() - LINE_FIELDS if record["phase"] == CALLBACK else ():
                if (media := self._media(f"{CALLBACK}/{name}", record[name])) is not None:
                    self._check(self._events.path, self._events.add_summary(media, record["step"]))

    def sync(self) -> None:
        """Wait until what was logged is on the disk."""
        self._metrics.sync()

    def write_summary(self, summary: Summary) -> None:
        """Write how the run stands."""
        with self._writing_summary:
            if (folder := self.folder.check()) is None:  # another job's directory has the name
                return
            try:
                write_json(folder / SUMMARY_FILE, summary.as_dict())
            except OSError as error:
                self._check(folder / SUMMARY_FILE, error)

    def close(self) -> None:
        """Close files and the progress bar."""
        self._console.close()
        self._metrics.close()
        self._events.close()
        for reporter in self._reporters:  # callbacks with ``close``; all that they send is written
            reporter.close()
        self.folder.close()

    def _write_images(self, images: Mapping[str, bytes]) -> None:
        for name, png in images.items():
            if (folder := self.folder.check()) is None:
                return
            try:
                check_link(folder / IMAGES, folder)
                (folder / IMAGES).mkdir(exist_ok=True)
                write_parts(folder / name, [png])
            except OSError as error:
                self._check(folder / IMAGES, error)

    def _keep(self, phase: str, step: StepInfo, values: Mapping[str, Any]) -> dict[str, Any]:
        record = super()._keep(phase, step, values)
        self.append([record])
        self.add_events([record])
        return record

    def _media(self, tag: str, value: Any) -> Any:
        """Return a text or an image that a callback has logged for TensorBoard; None if it is neither."""
        if isinstance(value, str):
            return event_file.text_summary(tag, value)
        if not isinstance(value, dict) or (folder := self.folder.check()) is None:
            return None
        with suppress(OSError):
            return event_file.image_summary(tag, (folder / value["image"]).read_bytes())
        return None

    def _check(self, path: Path, error: OSError | None) -> None:
        """Look whether the directory is in its place; note once that a file cannot be written."""
        self.folder.check()
        if error is not None and path.name not in self._not_written:
            self._not_written.add(path.name)
            reason = error.strerror or error
            self.note(f"cannot write {path}: {reason}; training continues, it is tried again")
