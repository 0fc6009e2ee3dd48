"""Reports that call callbacks: those of other ranks, and that of rank 0, which shows and writes the run."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.backends.workers import peer_errors
from hvdtrain.callbacks import CALLBACK, EVENT, HOOKS, RunContext, Summary, hook_of, name_of
from hvdtrain.early_stopping import LINE_FIELDS
from hvdtrain.errors import ENDINGS, HvdtrainError, PeerLostError, WorkerFailure
from hvdtrain.host.launcher import is_muted
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.console import Console
from hvdtrain.reporting.records import WorkersChange
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE, Report, RunFolder
from hvdtrain.reporting.reporters import JsonlLog, SummaryFile, TensorBoard
from hvdtrain.storage.text import printable
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.user_errors import where_raised

if TYPE_CHECKING:
    import rich.console


class Dispatcher:
    """Calls the hooks of callbacks in the order of their list."""

    def __init__(
        self, callbacks: Sequence[Any], note: Callable[[str], None], started: Sequence[Any] = ()
    ) -> None:
        self._note = note
        self._callbacks = list(callbacks)
        self._built_in = {id(callback) for callback in started}
        self._hooks: dict[str, list[tuple[Any, Callable[..., None]]]] = {hook: [] for hook in HOOKS}
        self._called: dict[int, set[str]] = {}  # by callback that was started, its hooks that are called
        for callback in started:
            self._add_hooks(callback)
        self._ended = False

    def go_on_from(self, other: "Dispatcher") -> None:
        """Do not start callbacks that another dispatcher has started, nor call hooks that it gave up.

        Callbacks whose ``on_end`` it has called are over; those that it did not have are not.
        """
        self._called = {
            known: set() if other._ended else set(hooks) for known, hooks in other._called.items()
        }

    def start(self, context: RunContext) -> None:
        """Call ``on_start``; the other hooks of a callback are called from then on.

        Raises WorkerFailure if a callback fails whose errors end the job.
        """
        self.call("on_start", context)
        while self._callbacks:
            callback = self._callbacks[0]
            method = hook_of(callback, "on_start")
            is_known = id(callback) in self._called
            if method is None or is_known or self._succeeds(callback, "on_start", method, context):
                self._add_hooks(callback)
            else:
                self._called[id(callback)] = set()
            del self._callbacks[
                0
            ]  # not before: a collective in its on_start may fail, and it is called again

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of every callback that has it; nothing after ``end``.

        Raises WorkerFailure if a callback fails whose errors end the job. Raises PeerLostError if a
        collective in a callback failed; the callbacks after it have been called, too.
        """
        if self._ended or not self._hooks[hook]:
            return
        lost: PeerLostError | None = None
        kept = []
        for callback, method in self._hooks[hook]:
            try:
                if self._succeeds(callback, hook, method, *args):
                    kept.append((callback, method))
            except PeerLostError as error:
                lost = lost or error
                kept.append((callback, method))
        self._hooks[hook] = kept
        if lost is not None:
            raise lost

    def end(self, summary: Summary) -> None:
        """Call ``on_end`` of every callback, whether or not one of them fails; no hook is called after it.

        Raises WorkerFailure if one fails whose errors end the job, and training completed.
        """
        if self._ended:
            return
        self._ended = True
        failures = []
        for callback, method in self._hooks["on_end"]:
            try:
                self._succeeds(callback, "on_end", method, summary)
            except HvdtrainError as error:
                failures.append(error)
        if failures and summary.status == "completed":
            raise failures[0]
        for failure in failures:
            self._note(failure.problem)

    def _add_hooks(self, callback: Any) -> None:
        called = self._called.setdefault(id(callback), set(HOOKS))
        for hook in HOOKS:
            is_over = hook == "on_start" and id(callback) not in self._built_in
            if hook in called and not is_over and (method := hook_of(callback, hook)) is not None:
                self._hooks[hook].append((callback, method))

    def _succeeds(self, callback: Any, hook: str, method: Callable[..., None], *args: Any) -> bool:
        """Call a hook; return False if it failed and the job continues."""
        try:
            with self._activity(callback, hook), peer_errors():
                method(*args)
        except (PeerLostError, *ENDINGS):
            raise
        except BaseException as error:
            problem = f"callback {name_of(callback)} failed in {hook}: {where_raised(error)}"
            if getattr(callback, "errors_end_job", True) or not isinstance(error, Exception):
                raise WorkerFailure(problem) from error
            self._note(f"{problem}; {_consequence(hook)}")
            self._called.get(id(callback), set()).discard(hook)
            return False
        return True

    def _activity(self, callback: Any, hook: str) -> AbstractContextManager[None]:
        """Return a context that tells the watch of the workers of a user's callback, which may take long."""
        if id(callback) in self._built_in or not ACTIVITY.is_of_this_thread:
            return nullcontext()
        step = ACTIVITY.current.step
        return ACTIVITY.during(f"in {hook} of {name_of(callback)}" + (" after step" if step else ""), step)


def _consequence(hook: str) -> str:
    if hook == "on_end":
        return "training was over"
    return "the callback is not called again" if hook == "on_start" else f"its {hook} is not called again"


class Reporter(Protocol):
    """A built-in callback that is chosen for a run, such as one that has it sent to trackers."""

    def close(self) -> None:
        """End what it does, in limited time. All files of the report are written."""
        ...


class CallbackReport(Report):
    """A report that passes on what it receives to callbacks. On other ranks than 0 it shows nothing itself."""

    def __init__(self, context: RunContext, callbacks: Sequence[Any], built_in: Sequence[Any] = ()) -> None:
        super().__init__()
        self._context = replace(context, note=self.note, log=self._log, seconds=self.seconds)
        self._steps_done: int | None = None
        self._dispatcher = Dispatcher(callbacks, self._note_failure, built_in)

    def on_start(self, steps: int, done: int, seconds_before: float = 0.0) -> None:
        """Start the clock and call the callbacks' ``on_start``."""
        super().on_start(steps, done, seconds_before)
        self._context.steps = steps
        self._context.steps_done = done if self._steps_done is None else self._steps_done
        self._dispatcher.start(self._context)

    def go_on_from(self, report: Report, steps: int, done: int) -> None:
        """Take the place of this worker's report until now."""
        super().go_on_from(report, steps, done)
        if isinstance(report, CallbackReport):
            self._dispatcher.go_on_from(report._dispatcher)
            new, self._context = self._context, report._context  # which callbacks may have kept
            self._context.rank, self._context.workers = new.rank, new.workers
            self._context.note, self._context.log, self._context.seconds = new.note, new.log, new.seconds
            self._steps_done = self._context.steps_done
        self.on_start(steps, done)

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Report a step."""
        self._dispatcher.call("on_step", step, metrics)

    def _take_window(self, step: StepInfo, values: Mapping[str, float]) -> None:
        super()._take_window(step, values)
        self._dispatcher.call("on_window", step, values)

    def _take_evaluation(self, step: StepInfo, values: Mapping[str, float]) -> None:
        super()._take_evaluation(step, values)
        self._dispatcher.call("on_evaluation", step, values)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Report that a checkpoint is complete on the disk."""
        self._dispatcher.call("on_checkpoint", step, path)

    def on_workers_changed(self, rank: int, workers: int) -> None:
        """Tell callbacks that the workers changed."""
        self._context.rank, self._context.workers = rank, workers
        self._dispatcher.call("on_workers_changed", self._context)

    def on_end(self, summary: Summary) -> None:
        """Report how training ended."""
        self._dispatcher.end(summary)

    def _log(self, step: StepInfo, values: Mapping[str, float]) -> None:
        """Keep a callback's numbers; rank 0 writes them."""
        self._keep(CALLBACK, step, values)

    def _note_failure(self, text: str) -> None:
        if is_muted():
            return
        print(printable(f"note: rank {self._context.rank}: {text}"), file=sys.stderr, flush=True)


def report_of_others(context: RunContext, callbacks: Sequence[Any]) -> Report:
    """Return the report of another rank than 0, which calls the callbacks of every rank."""
    own = [callback for callback in callbacks if getattr(callback, "every_rank", False)]
    return CallbackReport(context, own) if own else Report()


class RunReport(CallbackReport):
    """The report of rank 0: console, metrics.jsonl, TensorBoard events, summary.json, then users' callbacks."""

    def __init__(
        self,
        console: "rich.console.Console",
        context: RunContext,
        resumed_step: int | None = None,
        callbacks: Sequence[Any] = (),
        *,
        on_made_anew: Callable[[Path], None] = lambda path: None,
        lost_lease: Callable[[], str] = lambda: "",
        lost_lock: Callable[[], str] = lambda: "",
        reporters: Sequence[Reporter] = (),
    ) -> None:
        run_dir = context.run_dir
        folder = RunFolder(run_dir, on_made_anew, lost_lease, lost_lock)
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
        config, run_dir = self._context.config, self._context.run_dir
        if "tensorboard" in config.track:
            values = config.model_dump(mode="json", exclude={"run_dir", "resume"})
            text = f"```yaml\n{config.to_yaml()}```"
            self._events.write_config(values, text, done, run_dir.resolve().name)

    def on_end(self, summary: Summary) -> None:
        """Report how training ended."""
        if "tensorboard" in self._context.config.track and summary.status == "completed":
            self._events.write_end(summary.steps)
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
