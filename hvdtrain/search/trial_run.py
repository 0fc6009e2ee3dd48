"""The run directory of a trial: where it is, and what it says."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.jobs.run_directory import CHECKPOINTS
from hvdtrain.reporting.lock_state import look_at_lock
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE

_POLL_SECONDS = 0.1
_FREE_SECONDS = 60.0


def run_directory(folder: Path, number: int) -> Path:
    """Return the run directory of a trial."""
    return folder / f"trial-{number:04d}"


def wait_until_free(run_dir: Path) -> None:
    """Wait until no job works in a run directory: one that was asked to end may still save its state.

    After a minute the job that is started finds out, and says so.
    """
    until = time.monotonic() + _FREE_SECONDS
    while look_at_lock(run_dir).is_held and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def has_trained(run_dir: Path) -> bool:
    """Return whether a run has logged a step or has a checkpoint."""
    with suppress(OSError):
        if (run_dir / METRICS_FILE).stat().st_size:
            return True
    with suppress(OSError):
        return any((run_dir / CHECKPOINTS).iterdir())
    return False


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return how a run ended; empty if it does not say so."""
    with suppress(OSError, ValueError):
        found = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}
