"""How a run ended or stands, in one word. All commands and trackers take the word from here.

docs/reports.md says what each of them means.
"""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.reporting.lock_state import LockState
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE

RUNNING, COMPLETED, UNSAVED, STOPPED = "running", "completed", "unsaved", "stopped"
FAILED, KILLED, UNKNOWN = "failed", "killed", "unknown"
LOST_SECONDS = 10.0  # between two worlds of an elastic job, nobody holds the lock for a moment
FAR_SECONDS = 600.0  # a shared folder may not show the locks of another host


def status_of(
    summary: Mapping[str, Any] | None,
    lock: LockState,
    silent_seconds: float = math.inf,
    watched_seconds: float = 0.0,
    problem: str = "",
) -> str:
    """Return the word for how a run ended or stands.

    Args:
        summary: how its last job ended; None if that did not say so.
        lock: who uses its directory.
        silent_seconds: how long ago the last record came.
        watched_seconds: how long it has been watched with the lock as it is; 0 if it is looked at once.
        problem: why the summary cannot be read, if it is there.
    """
    if summary is not None:
        return ending_of(summary)
    if lock.is_held:
        return RUNNING
    if problem:
        return UNKNOWN
    limit_seconds = LOST_SECONDS if lock.is_free_here else FAR_SECONDS
    if silent_seconds < min(limit_seconds, watched_seconds):
        return RUNNING  # records came meanwhile
    return KILLED if lock.is_held is False and silent_seconds >= limit_seconds else UNKNOWN


def ending_of(summary: Mapping[str, Any]) -> str:
    """Return the word for how a summary says that a run ended."""
    status = summary.get("status")
    return status if status in (COMPLETED, UNSAVED, STOPPED, FAILED) else UNKNOWN


def is_outdated(run_dir: Path, lock: LockState) -> bool:
    """Return whether a summary is of an earlier job than one that may train now.

    A job that resumes a run removes the summary of the one before when it has set up the rest.

    Raises:
        OSError: If that cannot be found out.
    """
    if lock.is_free_here:
        return False
    try:
        return os.stat(run_dir / SUMMARY_FILE).st_mtime_ns < lock.changed_ns
    except FileNotFoundError:
        return False


def silent_seconds_of(run_dir: Path) -> float:
    """Return how long ago a run wrote its last record; infinity if it has none, or that cannot be told."""
    try:
        return max(0.0, time.time() - os.stat(run_dir / METRICS_FILE).st_mtime)
    except OSError:
        return math.inf
