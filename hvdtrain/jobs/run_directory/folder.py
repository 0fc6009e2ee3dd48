"""The run directory, which rank 0 makes and writes into, and the report of each rank."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hvdtrain.callbacks import RunContext
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, EnvironmentFault
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs.failures import forget_causes
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.jobs.run_directory.provenance import Provenance, config_text
from hvdtrain.reporting.index_trace import INDICES, trace_files
from hvdtrain.reporting.jsonl import AppendFile, sync_folder, write_whole
from hvdtrain.reporting.lock_state import LOCK_FILE
from hvdtrain.reporting.records import cut_log
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE, Report, report_of_others
from hvdtrain.reporting.run_report import Reporter, RunReport
from hvdtrain.storage.files import check_link, run_folder
from hvdtrain.storage.urls import is_url
from hvdtrain.workers.agreement import Workers, run_on_rank_zero

CHECKPOINTS = "checkpoints"


def open_run(
    config: Config,
    workers: Workers,
    resumed_step: int | None = None,
    callbacks: Sequence[Any] = (),
    context: RunContext | None = None,
    *,
    lock: RunLock | None = None,
    lost_lease: Callable[[], str] = lambda: "",
    provenance: Provenance | None = None,
    new_reporters: Callable[[Path], Sequence[Reporter]] = lambda path: (),
) -> tuple[Report, Path]:
    """Collective. Make the run directory, or cut one back; return this rank's report and the directory."""
    context = context or RunContext(workers.rank, workers.size, config)
    report: Report = Report()

    def prepare() -> Path:
        nonlocal report
        try:
            path = _make_or_cut_back(config, resumed_step, lock, provenance)
            report = RunReport(
                open_console(),
                replace(context, run_dir=path),
                resumed_step,
                callbacks,
                lost_lease=lost_lease,
                lost_lock=lock.lost if lock is not None else lambda: "",
                reporters=new_reporters(path),
            )
            (path / SUMMARY_FILE).unlink(missing_ok=True)  # last: until here, the run before is as it was
        except OSError as error:
            raise EnvironmentFault(f"cannot make the run directory: {error}") from None
        return path

    try:
        path = run_on_rank_zero(workers, prepare)
        if lock is not None and lock.job:
            lock.note = lock.note or _note_on_sharing(workers, path, lock)
    except BaseException:
        report.close()
        raise
    if workers.rank != 0:
        report = report_of_others(replace(context, run_dir=path), callbacks)
    return report, path


def _make_or_cut_back(
    config: Config, resumed_step: int | None, lock: RunLock | None, provenance: Provenance | None
) -> Path:
    """Make the run directory, or cut one back to where training resumes; lock it, and write the config."""
    path = _make_new(config) if config.run_dir is None else run_folder(config.run_dir)
    path.mkdir(parents=True, exist_ok=True)
    check_link(path / INDICES, path)
    sync_folder(path.parent)
    if resumed_step is None and not (path / LOCK_FILE).exists():
        _check_is_free(path)  # and leave what is there as it was
    if lock is not None:
        lock.acquire(path)
    if resumed_step is None:
        _check_is_free(path)
    if (path / METRICS_FILE).exists():  # nothing changes in a directory that cannot be written
        AppendFile(path / METRICS_FILE).close()
    # before the logs: it detects a full disk
    write_whole(path / "config.yaml", config_text(config, path, provenance))
    forget_causes(path)
    if resumed_step is not None:
        for log in (path / METRICS_FILE, *trace_files(path)):
            cut_log(log, resumed_step)
    return path


def _note_on_sharing(workers: Workers, path: Path, lock: RunLock) -> str:
    """Collective. Return a note if some workers of an elastic job do not see its run directory."""
    gathered = workers.allgather_object((workers.host, workers.rank == 0 or lock.is_of_job(path)))
    hosts = sorted({host for host, is_seen in gathered if not is_seen})
    if not hosts:
        return ""
    return (
        f"{', '.join(hosts)} cannot see the run directory {path}: if rank 0 is lost and a worker there takes "
        "its place, it is made anew there, without what was written before; put it on a shared file system"
    )


def lock_run(config: Config, workers: Workers, lock: RunLock) -> None:
    """Collective. Lock the run directory that the config names, if it holds a run: before it is read."""

    def acquire() -> None:
        if config.run_dir is None:
            return
        path = run_folder(config.run_dir)
        is_stored = is_url(config.run_dir)
        if is_stored or (path.is_dir() and (config.resume or (path / LOCK_FILE).exists())):
            try:
                if is_stored:
                    path.mkdir(parents=True, exist_ok=True)
                lock.acquire(path)
            except OSError as error:
                raise EnvironmentFault(f"cannot lock the run directory: {error}") from None

    run_on_rank_zero(workers, acquire)


def note_on_links(run_dir: Path) -> str:
    """Return a note if checkpoints are written to, and deleted in, a folder elsewhere; else nothing."""
    folder = run_dir / CHECKPOINTS
    return f"{folder} is a link: checkpoints go to {folder.resolve()}" if folder.is_symlink() else ""


def _check_is_free(path: Path) -> None:
    """Check that a directory holds no run."""
    for name in (METRICS_FILE, SUMMARY_FILE, CHECKPOINTS):
        if (path / name).exists():
            raise ConfigError(
                f"run_dir: {path} already holds a run ({name})",
                'Add --resume (in Python resume="auto") to continue it, choose another --run-dir, or move it '
                "away.",
            )


def _make_new(config: Config) -> Path:
    """Make a directory whose name has task, framework and time, and return its path."""
    task = Path(config.task.rpartition(":")[2]).stem.lower()
    stem = Path("runs") / f"{task}-{config.framework}-{datetime.now():%Y%m%d-%H%M%S}"
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        path = stem.with_name(stem.name + suffix)
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise EnvironmentFault(f"cannot make a run directory: {stem} and 98 like it exist")
