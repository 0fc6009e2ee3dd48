"""The command ``watch``: evaluations, events and progress of a run."""

import math
import time
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hvdtrain.callbacks import EVAL, EVENT, TRAIN
from hvdtrain.errors import UsageError
from hvdtrain.reporting.stored_runs import (
    FILES,
    LOST_SECONDS,
    describe_event,
    metrics_in,
    metrics_text,
    number_text,
    plain,
)
from hvdtrain.storage.text import counted
from hvdtrain.tools.report.followed_run import FollowedRun, Kind, RunProgress, Standing

_POLL_SECONDS = 1.0
_WAIT_SECONDS = 60.0  # for a run that stopped or was killed while it was followed
_LINE_SECONDS = 5.0  # between plain lines of progress
_SILENT_SECONDS = 60.0  # without a record, after which plain lines say so; likewise between them
_EVALUATIONS = 100  # that plain lines show of those before
# of a window, with their labels and formats
_MEASURES = (
    ("learning_rate", "lr", ".3g"), ("samples_per_second", "samples/s", ",.0f"),
    ("data_wait_fraction", "data wait", ".0%"), ("slowest_rank", "slowest rank", ".0f"),
    ("wait_fraction", "waiting for it", ".0%"), ("peak_memory_mib", "peak MiB", ",.0f"),
)  # fmt: skip


def follow(run_dir: Path, wait: float | None = None) -> None:
    """Show a run until it ends.

    Raises UsageError if there is no run. Raises EnvironmentFault if its directory cannot be read.
    """
    followed, ends = FollowedRun(run_dir), Ends(wait)
    standing = followed.poll()
    view = View(run_dir)
    with view.screen:
        while standing.kind is not Kind.ABSENT or wait is not None:
            view.show(followed, standing)
            if ends.is_over(standing, time.monotonic()):
                break
            time.sleep(_POLL_SECONDS)
            standing = followed.poll()
    if standing.kind is Kind.ABSENT:
        raise UsageError(
            f"{run_dir}: no run (none of {', '.join(FILES)})",
            "Name a run directory. With --wait SECONDS, watch waits for the run to begin.",
        )


class Ends:
    """When following ends, with ``wait`` as of ``follow``."""

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
        # between two generations of an elastic job nobody holds the lock
        otherwise = LOST_SECONDS if standing.kind is Kind.KILLED else 0.0
        otherwise = _WAIT_SECONDS if self._has_trained else otherwise
        return now_seconds - self._since >= (otherwise if self._wait is None else self._wait)


class View:
    """Lines: evaluations, events, and progress, which stays in its place on a terminal."""

    def __init__(self, run_dir: Path, console: Console | None = None) -> None:
        self._console = console or Console()
        self._name = plain(run_dir.resolve().name)
        self.screen = (
            Live(console=self._console, auto_refresh=False) if self._console.is_terminal else nullcontext()
        )
        self._said: dict[str, str] = {}
        self._line_seconds = self._silent_seconds = -math.inf
        self._has_window = False

    def show(self, run: FollowedRun, standing: Standing) -> None:
        """Show what is new."""
        if run.cut_step is not None:
            text = "the run was resumed from there, or begun again"
            self._say(f"the log was cut back to step {run.cut_step:,}: {text}")
        if standing.kind is not Kind.ENDED:
            self._say_changes(standing=standing.text)
        self._say_changes(facts=_facts(run.progress), problem=run.progress.problem)
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
        if isinstance(self.screen, Live):
            self.screen.update(_page(run, standing, self._console.width), refresh=True)
        else:
            self._show_progress(run, standing)
        if standing.kind is Kind.ENDED:  # the last line says how
            self._say_changes(standing=standing.text)

    def _say_changes(self, **texts: str) -> None:
        for kind, text in texts.items():
            if text and self._said.get(kind) != text:
                self._say(f"{self._name}: {text}")
            self._said[kind] = text

    def _show_progress(self, run: FollowedRun, standing: Standing) -> None:
        now, is_training = time.monotonic(), standing.kind in (Kind.RUNNING, Kind.UNCLEAR)
        if self._has_window and (now - self._line_seconds >= _LINE_SECONDS or not is_training):
            self._has_window, self._line_seconds = False, now
            self._say(_line_of(run.progress, standing))
        is_silent = standing.kind is Kind.RUNNING and _SILENT_SECONDS <= run.silent_seconds < math.inf
        if is_silent and now - self._silent_seconds >= _SILENT_SECONDS:
            self._silent_seconds = now
            self._say(f"{self._name}: last record {duration(run.silent_seconds)} ago")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _page(run: FollowedRun, standing: Standing, width: int) -> Group:
    progress, parts = run.progress, []
    if (fraction := progress.fraction()) is not None:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=1.0, completed=fraction, width=min(40, width // 2)), f"{fraction:.1%}")
        parts.append(bar)
    best = (f"{name} {best.value:.4g} at step {best.step:,}" for name, best in progress.best.items())
    texts = [_line_of(progress, standing)] if progress.window else []
    texts += [f"best {'  '.join(best)}"] if progress.best else []
    texts += [f"last record {duration(run.silent_seconds)} ago"] if math.isfinite(run.silent_seconds) else []
    return Group(*parts, *map(Text, texts))


def _line_of(progress: RunProgress, standing: Standing) -> str:
    seconds = progress.seconds_left() if standing.kind is Kind.RUNNING else None
    parts = [
        f"train step {progress.step:>6,}", f"epoch {progress.epoch:6.2f}",
        metrics_text(metrics_in(progress.window)),
        *(f"{label} {number_text(progress.window[name], form)}" for name, label, form in _MEASURES
          if name in progress.window),
        "" if seconds is None else f"{duration(seconds)} left",
    ]  # fmt: skip
    return "  ".join(filter(None, parts))


def _facts(progress: RunProgress) -> str:
    names = [plain(str(progress.config[name])) for name in ("task", "framework") if name in progress.config]
    return ", ".join([*names, *([counted(progress.workers, "worker")] if progress.workers else [])])


def duration(seconds: float) -> str:
    """Return a time span as text: "12 s", "3 min 5 s", "2 h 10 min", "3 d 4 h"."""
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    for size, unit, smaller_size, smaller in units:
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"
