"""The tables of a page: results, differences of the configs, environment."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.checkpoints.storage import MANIFEST_FILE, checkpoints_in, step_of
from hvdtrain.checkpoints.verification import read_manifest, verify
from hvdtrain.errors import EnvironmentFault
from hvdtrain.reporting.comparison import FACTS, Row, differing_fields, metric_names
from hvdtrain.reporting.stored_runs import CONFIG_FILE, StoredRun, flat, number_text, plain, value_text
from hvdtrain.storage.text import url_of

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


_MEASURED = {"seconds": ",.1f", "samples/s": ",.0f", "peak MiB": ",.0f"}
_NAMED = re.compile(r"([A-Za-z][A-Za-z ]{0,39}): (.*)")


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes:
        head: titles of the columns.
        rows: cells of each row; the first names the row.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def results_table(rows: Sequence[Row], statuses: Sequence[str]) -> PageTable:
    """Return a row for each run, with its last and best metrics.

    Args:
        rows: what is compared of the runs.
        statuses: how each of them stands, in words.
    """
    metrics, trained = metric_names(rows), metric_names(rows, is_trained_only=True)
    facts = [name for name in FACTS if name != "status" and any(row.facts.get(name) for row in rows)]
    measured = [name for name in _MEASURED if name != "peak MiB" or any(map(_peak, rows))]
    head = ["run", "status", *facts, *measured]
    for name in metrics:
        head += [f"last {name}", f"best {name}"]
    head += [f"last {name} in training" for name in trained]
    return PageTable(head, [
        [row.name, status, *(row.facts.get(name, "") for name in facts), *_measured(row)[: len(measured)],
         *(cell for name in metrics for cell in _last_and_best(row, name)),
         *(_text(row.last.get(name)) if row.is_trained_only else "" for name in trained)]
        for row, status in zip(rows, statuses, strict=True)
    ])  # fmt: skip


def _measured(row: Row) -> list[str]:
    """Return what was measured of a run; the peak of memory last."""
    numbers = (row.seconds, row.samples_per_second, _peak(row))
    return [number_text(found, form) for found, form in zip(numbers, _MEASURED.values(), strict=True)]


def _peak(row: Row) -> Any:
    return row.peak_memory_mib


def _last_and_best(row: Row, name: str) -> list[str]:
    best = row.best.get(name)
    at = f" at step {best.step:,}" if best is not None and best.step is not None else ""
    is_there = not row.is_trained_only and name in row.last
    return [_text(row.last[name]) if is_there else "", "" if best is None else f"{_text(best.value)}{at}"]


def _text(value: Any) -> str:
    return "no number" if value is None else number_text(value, ".4f")


def differences_table(rows: Sequence[Row]) -> PageTable | None:
    """Return the config fields that differ, a column for each run; None if none does."""
    fields = differing_fields(rows)
    if not fields:
        return None
    head = ["field", *(row.name for row in rows)]
    return PageTable(head, [[field, *(_field(row.config, field) for row in rows)] for field in fields])


def _field(config: Mapping[str, str], field: str) -> str:
    return (config[field] or "null") if field in config else "unknown"


def environment_table(
    runs: Sequence[StoredRun], names: Sequence[str], checkpoints: Sequence[Sequence[StoredCheckpoint]],
    holders: Sequence[str],
) -> PageTable:  # fmt: skip
    """Return what trained each run, as far as its newest checkpoint, its config and its lock say.

    Args:
        runs: the runs.
        names: their names.
        checkpoints: checkpoints of each run.
        holders: the process and the host of each run's job, in words.
    """
    versions = [_versions(of_run) for of_run in checkpoints]
    known = list(dict.fromkeys(name for of_run in versions for name in of_run))
    rows = [[name, *(of_run.get(name, "") for of_run in versions)] for name in known]
    rows.append(["job", *holders])
    headers = [_header_values(run) for run in runs]
    for name in dict.fromkeys(name for header in headers for name in header):
        rows.append([name, *(header.get(name, "") for header in headers)])
    return PageTable(["", *names], [row for row in rows if any(row[1:])])


def _header_values(run: StoredRun) -> dict[str, str]:
    """Return what the comment above a config says, by name; under the file's name what has none."""
    values: dict[str, str] = {}
    for line in run.header:
        named = _NAMED.fullmatch(line)
        name, text = (named[1], named[2]) if named else (CONFIG_FILE, line)
        values[name] = f"{values[name]}; {text}" if name in values else text
    return values


def _versions(checkpoints: Sequence[StoredCheckpoint]) -> dict[str, str]:
    newest = next((found for found in reversed(checkpoints) if found.versions), None)
    return {} if newest is None else {plain(name): plain(text) for name, text in newest.versions.items()}


def config_rows(run: StoredRun) -> list[tuple[str, str]]:
    """Return all config fields of a run."""
    return [(name, value or "null") for name, value in flat(run.config).items()]


def checkpoints_table(names: Sequence[str], checkpoints: Sequence[Sequence[StoredCheckpoint]]) -> PageTable:
    """Return a row for each checkpoint of each run, the newest first.

    Args:
        names: the runs' names.
        checkpoints: the checkpoints of each of them.
    """
    head = ["run", "checkpoint", "checked", "epoch", "evaluation", "framework", "workers", "size", "saved"]
    return PageTable(head, [
        [name, found.name, found.state, "" if found.epoch is None else f"{found.epoch:.2f}",
         ", ".join(f"{plain(metric)} {_text(value)}" for metric, value in found.metrics.items()),
         found.framework, value_text(found.workers), _size(found.size), found.saved]
        for name, of_run in zip(names, checkpoints, strict=True) for found in reversed(of_run)
    ])  # fmt: skip


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
