"""The tables of a page: results, differences of the configs, checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.storage import checkpoints_in
from hvdtrain.checkpoints.verification import read_manifest, verify
from hvdtrain.errors import EnvironmentFault
from hvdtrain.reporting.comparison import FACTS, Row, differing_fields, metric_names
from hvdtrain.reporting.stored_runs import (
    metric_text,
    metrics_text,
    number_text,
    plain,
)
from hvdtrain.storage.text import url_of

_MOST = 100  # checkpoints of a run that are listed, the newest


class Table(NamedTuple):
    """A table: titles of its columns, and the cells of each row, the first of which names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class StoredCheckpoint(NamedTuple):
    """What is known of a checkpoint.

    Attributes:
        path: its directory.
        state: "verified", "not checked", or what is wrong with it.
        manifest: its manifest; None if that cannot be read.
    """

    path: Path
    state: str
    manifest: Manifest | None


def stored_checkpoints(run_dir: Path, verified: bool = True) -> tuple[list[StoredCheckpoint], list[str]]:
    """Return the checkpoints of a run, the newest last, and what to say of others.

    Args:
        run_dir: the run directory.
        verified: whether to check every byte, if they are on this host.
    """
    folder = run_dir / "checkpoints"
    verified = verified and not url_of(run_dir)  # of those at a URL, only the manifests are here
    try:
        paths = checkpoints_in(folder)
        set_aside = sorted(path.name for path in folder.iterdir() if path.name.startswith("set-aside-"))
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [plain(f"checkpoints cannot be read: {error}")]
    notes = [f"{len(paths) - _MOST:,} older checkpoints are left out"] if len(paths) > _MOST else []
    notes += [plain(f"damaged, and set aside: {', '.join(set_aside)}")] if set_aside else []
    found = [StoredCheckpoint(path, _state(path, verified), read_manifest(path)) for path in paths[-_MOST:]]
    return [one for one in found if one.path.exists()], notes  # the run may have deleted it meanwhile


def _state(path: Path, verified: bool) -> str:
    if not verified:
        return "not checked"
    try:
        verify(path)
    except CorruptCheckpoint as error:
        return plain(f"damaged: {error}")
    except EnvironmentFault as error:
        return plain(f"cannot be read: {error.problem}")
    return "verified"


def checkpoints_table(names: Sequence[str], checkpoints: Sequence[Sequence[StoredCheckpoint]]) -> Table:
    """Return a row for each checkpoint of each run, the newest first."""
    named = [(name, one) for name, of_run in zip(names, checkpoints, strict=True) for one in reversed(of_run)]
    head = ["run", "checkpoint", "checked", "epoch", "evaluation", "size"]
    return Table(head, [[name, one.path.name, one.state, *_contents(one.manifest)] for name, one in named])


def _contents(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return [""] * 3
    epoch = "" if manifest.epoch is None else f"{manifest.epoch:.2f}"
    size = sum(info.bytes for info in manifest.files.values())
    return [epoch, metrics_text(manifest.metrics or manifest.last_metrics, ", "), decimal(size)]


def results_table(rows: Sequence[Row], statuses: Sequence[str]) -> Table:
    """Return a row for each run, with its last and best metrics.

    Args:
        rows: what is compared of the runs.
        statuses: the word for how each of them ended or stands.
    """
    facts = [name for name in FACTS if name != "status" and any(row.facts.get(name) for row in rows)]
    metrics, trained = metric_names(rows), metric_names(rows, is_trained_only=True)
    head = ["run", "status", *facts, "seconds", "samples/s", "peak MiB"]
    head += [f"{which} {name}" for name in metrics for which in ("last", "best")]
    head += [f"last {name} in training" for name in trained]
    return Table(head, [
        [row.name, status, *(row.facts.get(name, "") for name in facts), number_text(row.seconds, ",.1f"),
         number_text(row.samples_per_second, ",.0f"), number_text(row.peak_memory_mib, ",.0f"),
         *(cell for name in metrics for cell in (_last(row, name, row.is_trained_only), _best(row, name))),
         *(_last(row, name, not row.is_trained_only) for name in trained)]
        for row, status in zip(rows, statuses, strict=True)
    ])  # fmt: skip


def _last(row: Row, name: str, is_of_others: bool) -> str:
    return "" if is_of_others or name not in row.last else metric_text(row.last[name])


def _best(row: Row, name: str) -> str:
    if (best := row.best.get(name)) is None:
        return ""
    return metric_text(best.value) + (f" at step {best.step:,}" if best.step is not None else "")


def differences_table(rows: Sequence[Row]) -> Table | None:
    """Return the config fields that differ, a column for each run; None if none does."""
    fields = differing_fields(rows)
    cells = [[name, *(_field(row.config, name) for row in rows)] for name in fields]
    return Table(["field", *(row.name for row in rows)], cells) if cells else None


def _field(config: Mapping[str, str], name: str) -> str:
    return (config[name] or "null") if name in config else "unknown"
