"""What ``watch`` shows: a live view on a terminal, plain lines elsewhere."""

import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hvdtrain.early_stopping import LINE_FIELDS
from hvdtrain.reporting.comparison import Best, goal_of
from hvdtrain.reporting.log_records import count_of, metrics_in, number
from hvdtrain.reporting.records import EVAL, EVENT, TRAIN
from hvdtrain.reporting.stored_runs import number_text, plain
from hvdtrain.storage.text import counted
from hvdtrain.tools.report.events import describe_event
from hvdtrain.tools.report.standing import Kind, Standing

_WINDOWS = 50  # of the last windows, how fast training is
_PROGRESS_EVENTS = 100  # that are kept; likewise evaluations
_LONGEST_SECONDS = 1e11  # no training takes 3,000 years


class RunProgress:
    """What the records of a run say.

    Attributes:
        config: fields of the run's config.
        step, epoch, seconds, workers: those of the last record.
        train: values of the last window.
        evaluation: metrics of the last evaluation, and its step in ``evaluated_step``.
        evaluations: evaluations with their steps.
        evaluation_count: how many there were; ``evaluations`` has the last of them.
        best: best values of the metrics.
        events: events in words, with their steps.
        event_count: how many there were; ``events`` has the last of them.
        problem: what is left out of the log, in words; empty if nothing is.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: Mapping[str, Any] = config or {}
        self.step, self.epoch, self.seconds, self.workers = 0, 0.0, 0.0, 0
        self.train: dict[str, Any] = {}
        self.evaluation: dict[str, Any] = {}
        self.evaluated_step = 0
        self.evaluations: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_PROGRESS_EVENTS)
        self.evaluation_count = 0
        self.best: dict[str, Best] = {}
        self.events: deque[tuple[int, str]] = deque(maxlen=_PROGRESS_EVENTS)
        self.event_count = 0
        self.problem = ""
        self._places: deque[tuple[float, float, float]] = deque(maxlen=_WINDOWS)  # step, epoch, seconds

    def take(self, record: Mapping[str, Any]) -> None:
        """Take a record; one without a step is left out."""
        step = count_of(record.get("step"))
        if step is None:
            return
        self.step = step
        self.epoch = _finite(record.get("epoch"), self.epoch)
        self.seconds = _finite(record.get("seconds"), self.seconds)
        workers = record.get("workers")
        self.workers = workers if isinstance(workers, int) else self.workers
        phase = record.get("phase")
        if phase == TRAIN:
            self.train = {name: value for name, value in record.items() if name not in LINE_FIELDS}
            self._places.append((float(step), self.epoch, self.seconds))
        elif phase == EVAL:
            self._take_evaluation(step, metrics_in(record))
        elif phase == EVENT:
            self.events.append((step, describe_event(record)))
            self.event_count += 1
            self._places.clear()  # other workers have another speed

    def _take_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        self.evaluation, self.evaluated_step = metrics, step
        self.evaluations.append((step, metrics))
        self.evaluation_count += 1
        for name, value in metrics.items():
            found, known = number(value), self.best.get(name)
            if found is not None and goal_of(self.config, name).improves(found, known and known.value):
                self.best[name] = Best(found, step)

    @property
    def metrics(self) -> dict[str, Any]:
        """Means of the last window."""
        return metrics_in({"epoch": 0, **self.train})

    def fraction(self) -> float | None:
        """Return how much of the training is done, from 0 to 1; None if its length is not known."""
        done, length = self._length()
        return None if length is None else min(1.0, done / length)

    def seconds_left(self) -> float | None:
        """Return how long the rest takes at the speed of the last windows; None if that is not known."""
        seconds = self._rest_seconds()
        return seconds if seconds is not None and seconds < _LONGEST_SECONDS else None

    def _rest_seconds(self) -> float | None:
        done, length = self._length()
        if length is None:
            return None
        if done >= length:
            return 0.0
        first, last = (self._places[0], self._places[-1]) if self._places else ((0.0,) * 3, (0.0,) * 3)
        index = 0 if self._counts_steps() else 1
        if len(self._places) > 1 and last[2] > first[2] and last[index] > first[index]:
            return (length - done) * (last[2] - first[2]) / (last[index] - first[index])
        return (length - done) * self.seconds / done if done > 0 and self.seconds > 0 else None

    def _counts_steps(self) -> bool:
        return number(self.config.get("steps")) is not None and self.config.get("steps") is not None

    def _length(self) -> tuple[float, float | None]:
        """Return how far training is and its length, in steps or in epochs."""
        name, done = ("steps", float(self.step)) if self._counts_steps() else ("epochs", self.epoch)
        length = number(self.config.get(name))
        return done, length if length is not None and length > 0 and math.isfinite(length) else None


def _finite(value: Any, otherwise: float) -> float:
    found = number(value)
    return found if found is not None and math.isfinite(found) else otherwise


_LINE_SECONDS = 5.0  # between plain lines of progress
_SILENT_SECONDS = 60.0  # without a record, after which plain lines say so; likewise between them
_EVENTS = 5  # that the live view shows
_STYLES = {Kind.RUNNING: "green", Kind.UNCLEAR: "yellow", Kind.KILLED: "bold red", Kind.STOPPED: "yellow"}


class View(Protocol):
    """What shows a run."""

    def show(self, progress: RunProgress, standing: Standing, silent_seconds: float | None) -> None:
        """Show how the run stands now."""
        ...

    def cut(self, kept: RunProgress) -> None:
        """Show that the run resumed from an earlier step.

        Args:
            kept: what the records say that are still there.
        """
        ...

    def end(self, standing: Standing) -> None:
        """Show how the run ended, or that it is no longer waited for."""
        ...

    def __enter__(self) -> "View": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...


def open_view(run_dir: Path, console: Console | None = None) -> View:
    """Return the view for the console."""
    console = console or Console()
    name = plain(run_dir.resolve().name)
    return LiveView(console, name) if console.is_terminal else PlainView(console, name)


class LiveView:
    """A view that stays in its place on a terminal.

    Args:
        console: the terminal.
        name: the run's name.
    """

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def show(self, progress: RunProgress, standing: Standing, silent_seconds: float | None) -> None:
        """Show how the run stands now."""
        self._live.update(self._page(progress, standing, silent_seconds), refresh=True)

    def cut(self, kept: RunProgress) -> None:
        """Show that the run resumed from an earlier step."""
        self._console.print(Text(_cut_text(kept), style="yellow"))

    def end(self, standing: Standing) -> None:
        """Leave the last view where it is."""

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._live.stop()

    def _page(self, progress: RunProgress, standing: Standing, silent_seconds: float | None) -> Group:
        title = Text(self._name, style="bold").append(f"  {_facts(progress)}", style="dim")
        parts: list[Any] = [title, Text(standing.text, style=_STYLES.get(standing.kind, "bold"))]
        fraction = progress.fraction()
        if fraction is not None:
            bar = Table.grid(padding=(0, 1))
            bar.add_row(
                ProgressBar(total=1.0, completed=fraction, width=min(40, self._console.width // 2)),
                Text(f"{fraction:.1%}  {_left_text(progress, standing)}"),
            )
            parts.append(bar)
        parts.append(_values_table(progress))
        if silent_seconds is not None:
            late = standing.kind is Kind.RUNNING and silent_seconds >= _SILENT_SECONDS
            text = f"last record {duration(silent_seconds)} ago"
            parts.append(Text(text, style="yellow" if late else "dim"))
        if progress.problem:
            parts.append(Text(progress.problem, style="yellow"))
        for step, event in list(progress.events)[-_EVENTS:]:
            parts.append(Text(f"step {step:,}: {event}", style="cyan"))
        return Group(*parts)


def _values_table(progress: RunProgress) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("step", Text(f"{progress.step:,}   epoch {progress.epoch:.2f}"))
    if progress.train:
        table.add_row("train", Text(_metrics_text(progress.metrics)))
        table.add_row("speed", Text(_speed_text(progress.train)))
    if progress.evaluation:
        shown = f"{_metrics_text(progress.evaluation)}   at step {progress.evaluated_step:,}"
        table.add_row("eval", Text(shown))
        best = "  ".join(
            f"{name} {best.value:.4g} at step {best.step or 0:,}" for name, best in progress.best.items()
        )
        table.add_row("best", Text(best))
    return table


class PlainView:
    """Lines, if there is no terminal: evaluations, events, and progress every few seconds.

    Args:
        console: where lines go.
        name: the run's name.
    """

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._standing, self._problem = "", ""
        self._evaluations, self._events, self._trained_step = 0, 0, -1
        self._line_seconds = self._silent_seconds = float("-inf")
        self._is_first = True

    def show(self, progress: RunProgress, standing: Standing, silent_seconds: float | None) -> None:
        """Print what is new."""
        now = time.monotonic()
        if standing.text != self._standing:
            self._say(f"{self._name}: {standing.text}")
            self._standing = standing.text
        if self._is_first and (facts := _facts(progress)):  # a run that is not there yet has none
            self._say(f"{self._name}: {facts}")
            self._is_first = False
        if progress.problem and progress.problem != self._problem:
            self._say(f"{self._name}: {progress.problem}")
        self._problem = progress.problem
        self._show_events(progress)
        self._show_evaluations(progress)
        has_ended = standing.kind not in (Kind.RUNNING, Kind.UNCLEAR)
        is_due = now - self._line_seconds >= _LINE_SECONDS or has_ended
        if progress.train and progress.step != self._trained_step and is_due:
            self._trained_step, self._line_seconds = progress.step, now
            self._say(_line_of(progress, standing))
        self._note_silence(standing, silent_seconds, now)

    def cut(self, kept: RunProgress) -> None:
        """Print that the run resumed from an earlier step."""
        self._say(_cut_text(kept))
        self._evaluations, self._events, self._trained_step = kept.evaluation_count, kept.event_count, -1

    def end(self, standing: Standing) -> None:
        """Print that the run is no longer waited for, if it has not ended."""
        if standing.kind in (Kind.STOPPED, Kind.KILLED, Kind.ABSENT):
            self._say(f"{self._name}: no longer waited for")

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        pass

    def _show_events(self, progress: RunProgress) -> None:
        new, self._events = progress.event_count - self._events, progress.event_count
        for step, event in list(progress.events)[-new:] if new > 0 else ():
            self._say(f"event step {step:>6,}  {event}")

    def _show_evaluations(self, progress: RunProgress) -> None:
        new, self._evaluations = progress.evaluation_count - self._evaluations, progress.evaluation_count
        left_out = new - len(progress.evaluations)
        if left_out > 0:
            self._say(f"{counted(left_out, 'earlier evaluation')} left out")
        for step, metrics in list(progress.evaluations)[-new:] if new > 0 else ():
            self._say(f"eval  step {step:>6,}  {_metrics_text(metrics)}")

    def _note_silence(self, standing: Standing, silent_seconds: float | None, now: float) -> None:
        is_silent = standing.kind is Kind.RUNNING and (silent_seconds or 0.0) >= _SILENT_SECONDS
        if is_silent and now - self._silent_seconds >= _SILENT_SECONDS:
            self._silent_seconds = now
            self._say(f"{self._name}: last record {duration(silent_seconds or 0.0)} ago")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _line_of(progress: RunProgress, standing: Standing) -> str:
    parts = [
        f"train step {progress.step:>6,}", f"epoch {progress.epoch:6.2f}", _metrics_text(progress.metrics),
        _speed_text(progress.train), _left_text(progress, standing),
    ]  # fmt: skip
    return "  ".join(filter(None, parts))


def _facts(progress: RunProgress) -> str:
    names = [plain(str(progress.config[name])) for name in ("task", "framework") if name in progress.config]
    workers = [f"{progress.workers} worker{'s' if progress.workers != 1 else ''}"] if progress.workers else []
    return ", ".join([*names, *workers])


def _metrics_text(metrics: Mapping[str, Any]) -> str:
    shown = {
        name: "no number" if value is None else number_text(value, ".4f") for name, value in metrics.items()
    }
    return "  ".join(f"{name} {value}" for name, value in shown.items())


def _speed_text(train: Mapping[str, Any]) -> str:
    parts = [
        f"{label} {number_text(train[name], form)}"
        for name, label, form in (
            ("learning_rate", "lr", ".3g"), ("samples_per_second", "samples/s", ",.0f"),
            ("data_wait_fraction", "data wait", ".0%"), ("slowest_rank", "slowest rank", ".0f"),
            ("wait_fraction", "waiting for it", ".0%"), ("peak_memory_mib", "peak MiB", ",.0f"),
        )
        if name in train
    ]  # fmt: skip
    return "  ".join(parts)


def _left_text(progress: RunProgress, standing: Standing) -> str:
    seconds = progress.seconds_left() if standing.kind is Kind.RUNNING else None
    return "" if seconds is None else f"{duration(seconds)} left"


def _cut_text(kept: RunProgress) -> str:
    return f"the log was cut back to step {kept.step:,}: the run was resumed from there, or begun again"


def duration(seconds: float) -> str:
    """Return a time span in words: "12 s", "3 min 5 s", "2 h 10 min", "3 d 4 h"."""
    whole = round(seconds)
    for size, unit, smaller_size, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"
