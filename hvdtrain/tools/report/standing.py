"""Whether a run trains, has ended, or is gone without a word."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hvdtrain.reporting.lock_state import LockState, look_at_lock
from hvdtrain.reporting.stored_runs import (
    KILLED,
    LOST_SECONDS,
    RUNNING,
    STOPPED,
    UNKNOWN,
    holds_run,
    is_outdated,
    load_summary,
    number_text,
    plain,
    status_of,
)
from hvdtrain.storage.text import counted

_LEFT_SECONDS = 30.0  # after which a summary counts, though somebody keeps the lock


class Kind(Enum):
    """How a run stands."""

    ABSENT = "absent"
    RUNNING = "running"
    UNCLEAR = "unclear"  # whether it trains will be clear in a moment
    ENDED = "ended"
    STOPPED = "stopped"
    KILLED = "killed"


@dataclass(frozen=True)
class Standing:
    """How a run stands.

    Attributes:
        kind: whether it trains.
        text: the same in words.
    """

    kind: Kind
    text: str


class StandingWatch:
    """Looks how a run stands.

    Args:
        run_dir: its directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = LockState(None)
        # since when something has been so while the lock was as it is, in seconds of the caller's clock
        self._seen: dict[str, float] = {}

    def look(self, now_seconds: float, silent_seconds: float = math.inf) -> Standing:
        """Return how the run stands now.

        Args:
            now_seconds: a clock that only goes forward.
            silent_seconds: how long ago the last record came.

        Raises:
            OSError: If the directory cannot be read.
        """
        if not holds_run(self._run_dir):
            self._seen.clear()
            return Standing(Kind.ABSENT, f"{plain(str(self._run_dir))} holds no run yet")
        lock = look_at_lock(self._run_dir)
        if lock != self._lock:
            self._lock = lock
            self._seen.clear()
        summary, problem = load_summary(self._run_dir)
        if is_outdated(self._run_dir, lock):
            summary, problem = None, ""
        has_ended = summary is not None or bool(problem)
        ended_seconds = self._since("ended", has_ended, now_seconds)
        free_seconds = self._since("free", lock.is_held is False, now_seconds)
        watched_seconds = self._since("watched", True, now_seconds)
        status = status_of(summary, lock, silent_seconds, watched_seconds, problem)
        if has_ended and (not lock.is_held or ended_seconds >= _LEFT_SECONDS):
            return _ended(status, summary or {}, problem)
        if has_ended:
            return Standing(Kind.RUNNING, f"{status}; its job is about to end{_holder(lock)}")
        return _going(status, lock, free_seconds)

    def _since(self, name: str, is_so: bool, now_seconds: float) -> float:
        """Return how long something has been so, in seconds."""
        if not is_so:
            self._seen.pop(name, None)
            return -1.0
        return now_seconds - self._seen.setdefault(name, now_seconds)


def _going(status: str, lock: LockState, free_seconds: float) -> Standing:
    """Return how a run stands that has no summary.

    Args:
        status: the word for it.
        lock: its lock.
        free_seconds: how long nobody has held it.
    """
    unseen = "" if lock.is_held else "; whether its job is alive cannot be seen here"
    if status == RUNNING:
        return Standing(Kind.RUNNING, f"{status}{_holder(lock)}{unseen}")
    if status == KILLED and free_seconds >= LOST_SECONDS:
        text = "no job holds the lock of the run directory, and there is no summary; the last job"
        return Standing(Kind.KILLED, f"{status}: {text}{_holder(lock) or ': unknown'}")
    if lock.is_held is False and (status == KILLED or lock.is_free_here):
        return Standing(Kind.UNCLEAR, f"{UNKNOWN}: no job holds the lock of the run directory now")
    return Standing(Kind.RUNNING, f"{status}{_holder(lock)}{unseen}")


def _ended(status: str, summary: Mapping[str, Any], problem: str) -> Standing:
    kind = Kind.STOPPED if status == STOPPED else Kind.ENDED
    return Standing(kind, "; ".join(filter(None, [status, problem, describe_results(summary)])))


def describe_results(summary: Mapping[str, Any]) -> str:
    """Return what a run had done when it ended, and why it ended, in words."""
    steps = summary.get("steps")
    parts = []
    if isinstance(steps, int):
        parts.append(f"{counted(steps, 'step')} in {number_text(summary.get('seconds'), ',.1f')} s")
    final = summary.get("final")
    if isinstance(final, dict) and final:
        parts.append(
            ", ".join(f"{plain(str(name))} {number_text(value, '.4f')}" for name, value in final.items())
        )
    for name in ("stopped_early", "save_error", "error"):
        if summary.get(name):
            parts.append(plain(str(summary[name]).splitlines()[0]))
    return "; ".join(parts)


def _holder(lock: LockState) -> str:
    return plain(f": process {lock.process} on {lock.host} since {lock.since}") if lock.host else ""
