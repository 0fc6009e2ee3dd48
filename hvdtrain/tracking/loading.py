"""Loading the libraries of trackers, and what is known of a run before it is sent."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.errors import UsageError
from hvdtrain.regular_files import read_regular
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.tracking.folder import new_id, read_id, read_starts, write_id
from hvdtrain.tracking.sender import began_seconds
from hvdtrain.tracking.tracker import TrackedRun, Tracker

_MAX_BYTES = 1 << 22
_NOT_SENT = ("run_dir", "resume", "track", "track_checkpoints")


def _mlflow() -> Tracker:
    from hvdtrain.tracking.mlflow_tracker import MlflowTracker

    return MlflowTracker()


def _wandb() -> Tracker:
    from hvdtrain.tracking.wandb_tracker import WandbTracker

    return WandbTracker()


LOADERS: Mapping[str, Callable[[], Tracker]] = {"mlflow": _mlflow, "wandb": _wandb}


def tracked_run(run_dir: Path) -> TrackedRun:
    """Return what trackers are told of a run; one that was not tracked gets a name among trackers.

    Raises:
        UsageError: If the directory holds no run.
        OSError: If it can be neither read nor written.
    """
    if not (run_dir / "config.yaml").is_file():
        raise UsageError(
            f"{run_dir} is no run directory: it has no config.yaml",
            f"Give a directory that a run was written to, with config.yaml and {METRICS_FILE}.",
        )
    tracking_id = read_id(run_dir)
    if tracking_id is None:
        tracking_id = new_id()
        write_id(run_dir, tracking_id)
    starts = read_starts(run_dir)
    first = starts[0] if starts and isinstance(starts[0].get("time"), int | float) else None
    began = began_seconds(run_dir) if first is None else float(first["time"])
    return TrackedRun(run_dir, tracking_id, _config_of(run_dir), began)


def _config_of(run_dir: Path) -> dict[str, Any]:
    """Return the fields of a run's config that trackers are sent."""
    try:
        found = yaml.safe_load(read_regular(run_dir / "config.yaml", _MAX_BYTES))
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): value for name, value in found.items() if name not in _NOT_SENT}
