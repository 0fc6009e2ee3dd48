"""What a run shows on rank 0's console: text, a progress bar or plain lines, the result."""

import textwrap
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.callbacks import Callback, RunContext, Summary
from hvdtrain.early_stopping import BAD_SAMPLES, MEASURES, metrics_by_set
from hvdtrain.metrics import StepInfo
from hvdtrain.storage.text import counted

if TYPE_CHECKING:
    import rich.console
    from rich.progress import Progress, Task
    from rich.text import Text

_LINE_SECONDS = 5.0  # between plain lines of progress
_BAR_SECONDS = 0.1  # between updates of the bar
_BAR_WIDTH, _NARROW_BAR_WIDTH = 24, 10  # the narrow one is for terminals below 100 columns
_RATES = MEASURES | {BAD_SAMPLES}  # what values hold in addition to the means


class Console(Callback):
    """The built-in callback that shows progress, evaluations and the result."""

    def __init__(self, console: "rich.console.Console") -> None:
        self._console = console
        self._sets = [""]
        kind = _Cell if console.is_jupyter else _Bar if console.is_terminal else _Lines
        self._progress: _Lines = kind(console)

    def say(self, text: str, indent: int = 0) -> None:
        """Show text; on a terminal, lines that are too long continue at column ``indent`` if it is given."""
        if indent and self._console.is_terminal:
            wrap = partial(textwrap.fill, width=self._console.width, subsequent_indent=" " * indent)
            lines = text.splitlines()
            text = "\n".join(wrap(line, break_long_words=False, break_on_hyphens=False) for line in lines)
        self._console.print(text, highlight=False, markup=False)

    def note(self, text: str) -> None:
        """Show something that the user should know, such as a warning."""
        self._console.print(f"note: {text}", highlight=False, markup=False, style="yellow")

    def status(self, text: str) -> None:
        """Show, with the bar, what the run does until its next step."""
        self._progress.status(text)

    def on_start(self, context: RunContext) -> None:
        """Begin to show progress."""
        self._sets = list(context.eval_sets) or [""]
        self._progress.start(context.steps, context.steps_done)

    def on_step(self, step: StepInfo, metrics: StepMetrics) -> None:
        """Advance the progress."""
        self._progress.advance(step)

    def on_window(self, step: StepInfo, values: Mapping[str, float]) -> None:
        """Show the values of a window with the progress."""
        self._progress.show(step, values)

    def on_evaluation(self, step: StepInfo, metrics: Mapping[str, float]) -> None:
        """Show an evaluation as a line of its own; one for each set."""
        means = {name: value for name, value in metrics.items() if name not in _RATES}
        for name, of_set in metrics_by_set(means, self._sets).items():
            shown = f"{name}  {describe_means(of_set)}" if name else describe_means(of_set)
            self.say(f"eval  step {step.step:>6,}  epoch {step.epoch:6.2f}  {shown}")

    def on_change(self, text: str, steps: int) -> None:
        """Show that other workers continue, and the progress in this number of steps from now on."""
        self.say(text)
        self._progress.resize(steps)

    def on_end(self, summary: Summary) -> None:
        """Show how training ended."""
        self._progress.stop()
        if summary.failed_saves:
            self.note(
                f"{counted(summary.failed_saves, 'checkpoint')} could not be written; "
                f"the last: {summary.save_error}; newest good one: {summary.checkpoint or 'none'}"
            )
        if summary.bad_samples:
            self.note(f"{counted(summary.bad_samples, 'sample')} could not be read and were skipped")
        if summary.status == "completed" or (summary.status == "unsaved" and not summary.error):
            final = ", ".join(f"{name} {value:.4f}" for name, value in summary.final.items())
            end = "done" if summary.status == "completed" else "trained, not saved"
            host, device = summary.peak_memory_mib, summary.peak_device_memory_mib
            memory = f", at most {host:,.0f} MiB of memory per worker" if host else ""
            memory += f" and {device:,.0f} MiB on its GPU" if host and device else ""
            self.say(
                f"{end}: {final or 'no evaluation'}; {counted(summary.steps, 'step')} "
                f"in {summary.seconds:.1f} s, {summary.samples_per_second:,.0f} samples/s{memory}\n"
                f"run directory: {summary.run_dir}\ncheckpoint: {summary.checkpoint or 'none'}"
            )
            if summary.best_checkpoint:
                self.say(f"best checkpoint: {summary.best_checkpoint}")
        elif summary.status == "stopped" and summary.checkpoint:
            self.say(f"checkpoint: {summary.checkpoint}; the same command with --resume continues from it")

    def close(self) -> None:
        """Remove the progress bar."""
        self._progress.stop()


class _Lines:
    """Progress as plain lines, if there is no terminal: the first window, then one every few seconds."""

    def __init__(self, console: "rich.console.Console") -> None:
        self._console = console
        self._steps = 0
        self._last_seconds = float("-inf")

    def start(self, steps: int, done: int) -> None:
        self._steps = steps

    def resize(self, steps: int) -> None:
        self._steps = steps

    def advance(self, step: StepInfo) -> None: ...

    def status(self, text: str) -> None: ...

    def show(self, step: StepInfo, values: Mapping[str, float]) -> None:
        now = time.perf_counter()
        if now - self._last_seconds < _LINE_SECONDS and step.step < self._steps:
            return
        self._last_seconds = now
        text = f"train step {step.step:>6,}/{self._steps:,}  epoch {step.epoch:6.2f}  {_describe(values)}"
        self._console.print(text, highlight=False, markup=False)

    def stop(self) -> None: ...


class _Bar(_Lines):
    """Progress as a live bar at the bottom of the terminal."""

    def __init__(self, console: "rich.console.Console") -> None:
        super().__init__(console)
        self._bar: Progress | None = None
        self._step = 0
        self._values = self._status = ""

    def start(self, steps: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column
        from rich.text import Text

        class Values(TextColumn):
            """The values, in one line that is cut if the terminal is too narrow."""

            def render(self, task: "Task") -> "Text":
                return Text(task.fields["values"], no_wrap=True, overflow="ellipsis")

        width = _BAR_WIDTH if self._console.width >= 100 else _NARROW_BAR_WIDTH
        whole = [Column(no_wrap=True) for _ in range(5)]  # on a narrow terminal, only the values are cut
        self._bar = Progress(
            TextColumn("train", table_column=whole[0]),
            BarColumn(bar_width=width, table_column=whole[1]),
            MofNCompleteColumn(table_column=whole[2]),
            TimeRemainingColumn(table_column=whole[3]),
            TextColumn("left", table_column=whole[4]),
            Values(""),
            console=self._console,
            refresh_per_second=5,
        )
        self._step = done
        self._bar.add_task("train", total=steps, completed=done, values="")
        self._bar.start()

    def resize(self, steps: int) -> None:
        self._update(total=steps)

    def advance(self, step: StepInfo) -> None:
        self._step, self._status = step.step, ""
        now = time.perf_counter()
        if now - self._last_seconds > _BAR_SECONDS:
            self._last_seconds = now
            self._update()

    def show(self, step: StepInfo, values: Mapping[str, float]) -> None:
        # what a narrow terminal cuts comes last
        self._values = f"{_speed(values)}  epoch {step.epoch:.1f}  {_describe(values, with_speed=False)}"
        self.advance(step)

    def status(self, text: str) -> None:
        self._status = text
        self._update(refresh=True)

    def stop(self) -> None:
        self._status = ""
        self._update()  # what came since the last update
        if self._bar is not None:
            task = self._bar.tasks[0]
            self._bar.live.transient = not task.finished  # nothing is left of the bar of a run that was ended
            self._bar.stop()
            self._bar = None

    def _update(self, **more: Any) -> None:
        if self._bar is not None:
            values = self._status or self._values
            self._bar.update(self._bar.task_ids[0], completed=self._step, values=values, **more)


class _Cell(_Bar):
    """Progress as a bar in the cell of a notebook."""

    def start(self, steps: int, done: int) -> None:
        display = import_module("IPython.display").display
        self._steps, self._step, self._done = steps, done, done
        self._begun_seconds = time.perf_counter()
        self._handle = display({"text/plain": "train"}, raw=True, display_id=True)
        self._update()

    def _update(self, **more: Any) -> None:
        if (handle := getattr(self, "_handle", None)) is None:
            return
        self._steps = more.get("total", self._steps)
        text = f"{self._step:,}/{self._steps:,}"
        if (new := self._step - self._done) and self._step < self._steps:
            left = (time.perf_counter() - self._begun_seconds) / new * (self._steps - self._step)
            text += f"  {timedelta(seconds=round(left))} left"
        text += f"  {self._status or self._values}"
        bar = f'train <progress value="{self._step}" max="{self._steps}"></progress> {escape(text)}'
        handle.update({"text/plain": f"train {text}", "text/html": bar}, raw=True)


def describe_means(means: Mapping[str, float]) -> str:
    """Return metrics as text: "loss 0.1234  accuracy 0.9000"."""
    return "  ".join(f"{name} {value:.4f}" for name, value in means.items())


def _describe(values: Mapping[str, float], *, with_speed: bool = True) -> str:
    parts = [f"{name} {value:.4f}" for name, value in values.items() if name not in _RATES]
    parts.append(f"lr {values['learning_rate']:.3g}")
    return "  ".join([*parts, _speed(values)] if with_speed else parts)


def _speed(values: Mapping[str, float]) -> str:
    return f"{values['samples_per_second']:,.0f} samples/s"
