"""The checkpoints of a run, each verified: what they say of themselves, and of what trained them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.checkpoints.storage import MANIFEST_FILE, checkpoints_in, step_of
from hvdtrain.checkpoints.verification import read_manifest, verify
from hvdtrain.errors import EnvironmentFault
from hvdtrain.place_names import url_of
from hvdtrain.reporting.stored_runs import plain

_FOLDER = "checkpoints"
_MOST = 100  # that are listed, the newest


@dataclass(frozen=True)
class StoredCheckpoint:
    """What is known of a checkpoint.

    Attributes:
        name: its directory's name.
        step: steps done.
        state: "verified", "not checked", or what is wrong with it.
        is_good: whether every byte is as it was written; None if that was not checked.
        size: bytes of its files.
        saved: when, in UTC.
        epoch, workers, framework: of the training that wrote it.
        metrics: its evaluation.
        versions: versions of what trained.
    """

    name: str
    step: int
    state: str
    is_good: bool | None
    size: int = 0
    saved: str = ""
    epoch: float | None = None
    workers: int | None = None
    framework: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def stored_checkpoints(run_dir: Path, verified: bool = True) -> tuple[list[StoredCheckpoint], list[str]]:
    """Return the checkpoints of a run, the newest last, and what to say of others.

    Args:
        run_dir: the run directory.
        verified: whether to check every byte, if they are on this host.
    """
    folder = run_dir / _FOLDER
    notes = []
    verified = verified and not url_of(run_dir)  # of those at a URL, only the manifests are here
    try:
        paths = checkpoints_in(folder)
        set_aside = [path.name for path in folder.iterdir() if path.name.startswith("set-aside-")]
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [plain(f"checkpoints cannot be read: {error}")]
    if len(paths) > _MOST:
        notes.append(f"{len(paths) - _MOST:,} older checkpoints are left out")
    if set_aside:
        notes.append(plain(f"damaged, and set aside: {', '.join(sorted(set_aside)[:20])}"))
    found = [_read(path, verified) for path in paths[-_MOST:]]
    return [checkpoint for checkpoint in found if checkpoint is not None], notes


def _read(path: Path, verified: bool) -> StoredCheckpoint | None:
    """Read a checkpoint; None if it is no longer there: the run has deleted it meanwhile."""
    state, is_good = "not checked", None
    if verified:
        try:
            verify(path)
            state, is_good = "verified", True
        except CorruptCheckpoint as error:
            state, is_good = f"damaged: {error}", False
        except EnvironmentFault as error:
            state = f"cannot be read: {error.problem}"
    manifest = read_manifest(path)
    if not path.exists():
        return None
    if manifest is None:
        return StoredCheckpoint(path.name, step_of(path), plain(state), is_good)
    return StoredCheckpoint(
        path.name,
        manifest.step,
        plain(state),
        is_good,
        size=sum(info.bytes for info in manifest.files.values()),
        saved=_saved(path / MANIFEST_FILE),
        epoch=manifest.epoch,
        workers=manifest.workers,
        framework=plain(str(manifest.config.get("framework", ""))),
        metrics=manifest.metrics or manifest.last_metrics,
        versions=manifest.versions,
    )


def _saved(path: Path) -> str:
    try:
        return f"{datetime.fromtimestamp(os.stat(path).st_mtime, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OSError, OverflowError, ValueError):
        return ""
