"""The command ``watch``: a live view of a run on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hvdtrain.checkpoints.remote.fetched import FetchedRun, reading
from hvdtrain.errors import UsageError
from hvdtrain.reporting.log_records import describe_event, metrics_in
from hvdtrain.reporting.records import EVAL, EVENT, TRAIN
from hvdtrain.reporting.stored_runs import FILES, metrics_text, number_text, plain
from hvdtrain.storage.text import counted
from hvdtrain.tools.report.followed_run import FollowedRun, Kind, RunProgress, Standing

_POLL_SECONDS = 1.0
_POLL_URL_SECONDS = 10.0  # each look is a request
_WAIT_SECONDS = 60.0  # for a run that stopped or was killed while it was followed
_LINE_SECONDS = 5.0  # between plain lines of progress
_SILENT_SECONDS = 60.0  # without a record, after which plain lines say so; likewise between them
_EVALUATIONS = 100  # that plain lines show of those before
_STYLES = {Kind.RUNNING: "green", Kind.UNCLEAR: "yellow", Kind.KILLED: "bold red", Kind.STOPPED: "yellow"}


def follow(place: Path | str, wait: float | None = None) -> None:
    """Show a run until it ends.

    Args:
        place: its directory or its URL.
        wait: seconds to wait for a run that is not there, or that stopped or was killed, to train; if None, a
            minute for one that stopped while it was followed, and not at all for the others.

    Raises:
        UsageError: If there is no run.
        EnvironmentFault: If its directory cannot be read.
    """
    fetched = None
    if isinstance(place, str):
        with reading(place):
            fetched = FetchedRun(place)
    run_dir = Path(place) if fetched is None else fetched.path
    followed, ends = FollowedRun(run_dir, fetched), Ends(wait)
    standing = followed.poll()
    if standing.kind is Kind.ABSENT and wait is None:
        raise UsageError(
            f"{place}: no run (none of {', '.join(FILES)})",
            "Name a run directory. With --wait SECONDS, watch waits for the run to begin.",
        )
    view = open_view(run_dir)
    with view.screen:
        while True:
            view.show(followed, standing)
            if ends.is_over(standing, time.monotonic()):
                break
            time.sleep(_POLL_SECONDS if fetched is None else _POLL_URL_SECONDS)
            standing = followed.poll()


class Ends:
    """When following ends.

    Args:
        wait: as of ``follow``.
    """

    def __init__(self, wait: float | None) -> None:
        self._wait = wait
        self._has_trained = False
        self._since: float | None = None

    def is_over(self, standing: Standing, now_seconds: float) -> bool:
        """Return whether the run has ended, or has not trained for as long as it is waited for."""
        if standing.kind is Kind.UNCLEAR:
            return False
        if standing.kind is Kind.RUNNING:
            self._has_trained, self._since = True, None
            return False
        if standing.kind is Kind.ENDED:
            return True
        self._since = now_seconds if self._since is None else self._since
        otherwise = _WAIT_SECONDS if self._has_trained else 0.0
        return now_seconds - self._since >= (otherwise if self._wait is None else self._wait)


def open_view(run_dir: Path, console: Console | None = None) -> "PlainView":
    """Return the view for the console."""
    console = console or Console()
    name = plain(run_dir.resolve().name)
    return LiveView(console, name) if console.is_terminal else PlainView(console, name)


class PlainView:
    """Lines, if there is no terminal: evaluations, events, and progress every few seconds.

    Args:
        console: where lines are printed.
        name: the run's name.

    Attributes:
        screen: a context in which the view is shown.
    """

    def __init__(self, console: Console, name: str) -> None:
        self.screen: AbstractContextManager[Any] = nullcontext()
        self._console, self._name = console, name
        self._said: dict[str, str] = {}
        self._line_seconds = self._silent_seconds = -math.inf
        self._has_window = False

    def show(self, run: FollowedRun, standing: Standing) -> None:
        """Print what is new."""
        if run.cut_step is not None:
            self._say(_cut_text(run.cut_step))
        texts = {"standing": standing.text, "facts": _facts(run.progress), "problem": run.progress.problem}
        for kind, text in texts.items():
            if text and self._said.get(kind) != text:
                self._say(f"{self._name}: {text}")
            self._said[kind] = text
        left_out = sum(record.get("phase") == EVAL for record in run.records) - _EVALUATIONS
        if left_out > 0:
            self._say(f"{counted(left_out, 'earlier evaluation')} left out")
        for record in run.records:
            phase, step = record.get("phase"), f"step {record['step']:>6,}"
            self._has_window = self._has_window or phase == TRAIN
            left_out -= phase == EVAL
            if phase == EVENT:
                self._say(f"event {step}  {describe_event(record)}")
            elif phase == EVAL and left_out < 0:
                self._say(f"eval  {step}  {metrics_text(metrics_in(record))}")
        now = time.monotonic()
        has_ended = standing.kind not in (Kind.RUNNING, Kind.UNCLEAR)
        if self._has_window and (now - self._line_seconds >= _LINE_SECONDS or has_ended):
            self._has_window, self._line_seconds = False, now
            self._say(_line_of(run.progress, standing))
        if _is_silent(run, standing) and now - self._silent_seconds >= _SILENT_SECONDS:
            self._silent_seconds = now
            self._say(f"{self._name}: last record {duration(run.silent_seconds)} ago")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveView(PlainView):
    """A view that stays in its place on a terminal."""

    def __init__(self, console: Console, name: str) -> None:
        super().__init__(console, name)
        self.screen: Live = Live(console=console, auto_refresh=False)

    def show(self, run: FollowedRun, standing: Standing) -> None:
        """Show the run as it is now."""
        if run.cut_step is not None:
            self._say(_cut_text(run.cut_step))
        self.screen.update(self._page(run, standing), refresh=True)

    def _page(self, run: FollowedRun, standing: Standing) -> Group:
        progress = run.progress
        title = Text(self._name, style="bold").append(f"  {_facts(progress)}", style="dim")
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{progress.step:,}   epoch {progress.epoch:.2f}")
        if (fraction := progress.fraction()) is not None:
            table.add_row(
                "done", ProgressBar(total=1.0, completed=fraction, width=min(40, self._console.width // 2))
            )
            table.add_row("", Text(f"{fraction:.1%}  {_left_text(progress, standing)}"))
        if progress.window:
            table.add_row("train", Text(metrics_text(metrics_in(progress.window))))
            table.add_row("speed", Text(_speed_text(progress.window)))
        if progress.evaluation:
            metrics, step = metrics_text(metrics_in(progress.evaluation)), progress.evaluation["step"]
            table.add_row("eval", Text(f"{metrics}   at step {step:,}"))
            best = (f"{name} {best.value:.4g} at step {best.step:,}" for name, best in progress.best.items())
            table.add_row("best", Text("  ".join(best)))
        parts: list[Any] = [title, Text(standing.text, style=_STYLES.get(standing.kind, "bold")), table]
        if math.isfinite(run.silent_seconds):
            style = "yellow" if _is_silent(run, standing) else "dim"
            parts.append(Text(f"last record {duration(run.silent_seconds)} ago", style=style))
        parts += [Text(progress.problem, style="yellow")] if progress.problem else []
        parts += [Text(f"step {step:,}: {event}", style="cyan") for step, event in progress.events]
        return Group(*parts)


def _line_of(progress: RunProgress, standing: Standing) -> str:
    parts = [
        f"train step {progress.step:>6,}", f"epoch {progress.epoch:6.2f}", metrics_text(metrics_in(progress.window)),
        _speed_text(progress.window), _left_text(progress, standing),
    ]  # fmt: skip
    return "  ".join(filter(None, parts))


def _facts(progress: RunProgress) -> str:
    names = [plain(str(progress.config[name])) for name in ("task", "framework") if name in progress.config]
    return ", ".join([*names, *([counted(progress.workers, "worker")] if progress.workers else [])])


def _speed_text(window: Mapping[str, Any]) -> str:
    parts = [
        f"{label} {number_text(window[name], form)}"
        for name, label, form in (
            ("learning_rate", "lr", ".3g"), ("samples_per_second", "samples/s", ",.0f"),
            ("data_wait_fraction", "data wait", ".0%"), ("slowest_rank", "slowest rank", ".0f"),
            ("wait_fraction", "waiting for it", ".0%"), ("peak_memory_mib", "peak MiB", ",.0f"),
        )
        if name in window
    ]  # fmt: skip
    return "  ".join(parts)


def _left_text(progress: RunProgress, standing: Standing) -> str:
    seconds = progress.seconds_left() if standing.kind is Kind.RUNNING else None
    return "" if seconds is None else f"{duration(seconds)} left"


def _is_silent(run: FollowedRun, standing: Standing) -> bool:
    return standing.kind is Kind.RUNNING and _SILENT_SECONDS <= run.silent_seconds < math.inf


def _cut_text(step: int) -> str:
    return f"the log was cut back to step {step:,}: the run was resumed from there, or begun again"


def duration(seconds: float) -> str:
    """Return a time span as text: "12 s", "3 min 5 s", "2 h 10 min", "3 d 4 h"."""
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    for size, unit, smaller_size, smaller in units:
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"
