"""The report of rank 0, which shows and writes the run."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.callbacks import CALLBACK, EVENT, RunContext, Summary
from hvdtrain.early_stopping import LINE_FIELDS
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting import event_file
from hvdtrain.reporting.console import Console
from hvdtrain.reporting.records import WorkersChange
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE, Report, RunFolder
from hvdtrain.reporting.reporters import JsonlLog, SummaryFile, TensorBoard

if TYPE_CHECKING:
    import rich.console


class Reporter(Protocol):
    """A built-in callback that is chosen for a run, such as one that has it sent to trackers."""

    def close(self) -> None:
        """End what it does, in limited time. All files of the report are written."""
        ...


class RunReport(Report):
    """The report of rank 0: console, metrics.jsonl, TensorBoard events, summary.json, then callbacks.

    ``resumed_step`` is how many steps were done, if the run resumed in this directory; ``lost_lease`` and
    ``lost_lock`` are as of ``RunFolder``; ``reporters`` are further built-in callbacks, which it closes.
    """

    def __init__(
        self,
        console: "rich.console.Console",
        context: RunContext,
        resumed_step: int | None = None,
        callbacks: Sequence[Any] = (),
        *,
        lost_lease: Callable[[], str] = lambda: "",
        lost_lock: Callable[[], str] = lambda: "",
        reporters: Sequence[Reporter] = (),
    ) -> None:
        self._config, self._run_dir = context.config, context.run_dir
        run_dir = context.run_dir
        folder = RunFolder(run_dir, lost_lease, lost_lock)
        self._console = Console(console)
        self._metrics = JsonlLog(run_dir / METRICS_FILE, self.note, folder)
        self._events = TensorBoard(run_dir, resumed_step, self.note, folder)
        self._summary = SummaryFile(SUMMARY_FILE, self.note, folder)
        self._reporters = reporters
        built_in = (self._metrics, self._events, self._summary, self._console)
        super().__init__(context, callbacks, (*built_in, *reporters))
        self.folder = folder

    def add_events(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records that the log has already to TensorBoard, whose file this report has begun anew."""
        for record in records:
            self._events.write_record(record)

    def on_start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Start the clock, call the callbacks' ``on_start``, write the config for TensorBoard."""
        super().on_start(steps, done, seconds_before)
        config, run_dir = self._config, self._run_dir
        if "tensorboard" in config.track:
            values = config.model_dump(mode="json", exclude={"run_dir", "resume"})
            text = f"```yaml\n{config.to_yaml()}```"
            started = event_file.session_start(values, run_dir.resolve().name, time.time())
            self._events.add(done, started, event_file.text_summary("config", text))

    def on_end(self, summary: Summary) -> None:
        """Report how training ended."""
        if "tensorboard" in self._config.track and summary.status == "completed":
            self._events.add(summary.steps, event_file.session_end(time.time()))
        super().on_end(summary)

    def on_change(self, step: StepInfo, change: WorkersChange, steps: int) -> None:
        """Report that other workers continue with an elastic job."""
        super().on_change(step, change, steps)
        self._metrics.write(EVENT, step, change.values())
        self._events.write(EVENT, step, {"workers": step.workers, "pause_seconds": change.pause_seconds})
        self._console.on_change(change.describe(step.workers, step.step), steps)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records that the log lacks."""
        for record in records:
            self._metrics.append(record)

    def say(self, text: str, indent: int = 0) -> None:
        """Show text; long lines continue at a column if ``indent`` is given."""
        self._console.say(text, indent)

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
        for reporter in self._reporters:  # when all that they send is written
            reporter.close()
        if self.folder is not None:
            self.folder.close()

    def _log(self, step: StepInfo, values: Mapping[str, float]) -> None:
        if not LINE_FIELDS.isdisjoint(values):
            names = ", ".join(sorted(LINE_FIELDS & set(values)))
            raise ValueError(f"log(): {names} are names that every line of metrics.jsonl has; use others")
        # numbers of numpy and of the frameworks become Python's
        values = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
        super()._log(step, values)
        self._metrics.write(CALLBACK, step, values)
        self._events.write(CALLBACK, step, values)

    def _note_failure(self, text: str) -> None:
        self.note(text)
