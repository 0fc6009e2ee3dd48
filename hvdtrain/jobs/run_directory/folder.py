"""The run directory, which rank 0 makes and writes into, also at a URL, and the report of each rank."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.checkpoints.saver import Saver
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, EnvironmentFault
from hvdtrain.host.launcher import is_elastic
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.failures import CAUSE, Signals
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.jobs.run_directory.provenance import Provenance, config_text
from hvdtrain.reporting.jsonl import AppendFile, sync_folder, write_whole
from hvdtrain.reporting.lock_state import LOCK_FILE
from hvdtrain.reporting.records import INDICES, cut_log, trace_files
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE, Report
from hvdtrain.reporting.run_report import RunReport
from hvdtrain.session import Session
from hvdtrain.storage.files import check_link, run_folder
from hvdtrain.storage.urls import StoreError, is_url, join, shown
from hvdtrain.workers.agreement import Workers, run_on_rank_zero

if TYPE_CHECKING:
    from hvdtrain.checkpoints.remote.run_store import RunStore


CHECKPOINTS = "checkpoints"


def open_run(
    config: Config,
    workers: Workers,
    resumed_step: int | None,
    *,
    lock: RunLock,
    provenance: Provenance | None,
    make_report: Callable[[Path], RunReport],
) -> tuple[Path, RunReport | None]:
    """Collective. Make the run directory, or cut one back; return it, and rank 0's report on rank 0."""
    report: RunReport | None = None

    def prepare() -> Path:
        nonlocal report
        try:
            path = _make_or_cut_back(config, resumed_step, lock, provenance)
            report = make_report(path)
            (path / SUMMARY_FILE).unlink(missing_ok=True)  # last: until here, the run before is as it was
        except OSError as error:
            raise EnvironmentFault(f"cannot make the run directory: {error}") from None
        return path

    try:
        path = run_on_rank_zero(workers, prepare)
        if lock.job:
            gathered = workers.allgather_object((workers.host, workers.rank == 0 or lock.is_of_job(path)))
            if hosts := sorted({host for host, is_seen in gathered if not is_seen}):
                lock.note = lock.note or (
                    f"{', '.join(hosts)} cannot see the run directory {path}: if rank 0 is lost and a worker "
                    "there takes its place, it is made anew there, without what was written before; put it "
                    "on a shared file system"
                )
    except BaseException:
        if report is not None:
            report.close()
        raise
    return path, report


def _make_or_cut_back(
    config: Config, resumed_step: int | None, lock: RunLock, provenance: Provenance | None
) -> Path:
    """Make the run directory, or cut one back to where training resumes; lock it, and write the config."""
    path = _make_new(config) if config.run_dir is None else run_folder(config.run_dir)
    path.mkdir(parents=True, exist_ok=True)
    check_link(path / INDICES, path)
    sync_folder(path.parent)
    if resumed_step is None and not (path / LOCK_FILE).exists():
        _check_is_free(path)  # and leave what is there as it was
    lock.acquire(path)
    if resumed_step is None:
        _check_is_free(path)
    if (path / METRICS_FILE).exists():  # nothing changes in a directory that cannot be written
        AppendFile(path / METRICS_FILE).close()
    # before the logs: it detects a full disk
    write_whole(path / "config.yaml", config_text(config, path, provenance))
    (path / CAUSE).unlink(missing_ok=True)  # of an earlier job
    if resumed_step is not None:
        for log in (path / METRICS_FILE, *trace_files(path)):
            cut_log(log, resumed_step)
    return path


def claim_run(config: Config, workers: Workers, lock: RunLock, store: "RunStore | None") -> list[str]:
    """Collective. Lock the run directory that the config names, if it holds a run: before it is read."""
    # Of one at a URL, the working copy is brought to where the run stands.

    def claim() -> list[str]:
        path = run_folder(config.run_dir)
        try:
            if store is not None:
                path.mkdir(parents=True, exist_ok=True)
            elif not (config.run_dir and path.is_dir() and (config.resume or (path / LOCK_FILE).exists())):
                return []
            lock.acquire(path)
            return [] if store is None else store.begin(resumes_in_place(config))
        except StoreError as error:
            raise EnvironmentFault(f"run_dir: {error.problem}", error.remedy) from None
        except OSError as error:
            raise EnvironmentFault(f"cannot use {path} for the run directory: {error}") from None

    return run_on_rank_zero(workers, claim, "" if store is None else "reading the run directory in the store")


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


# seconds to wait for uploads: while the store fails, and in all
_COMPLETED, _STOPPED, _ENDED_EARLY = (60.0, 3600.0), (30.0, 300.0), (5.0, 20.0)
_LAST_SECONDS = 10.0  # for what trackers and event files wrote when they were closed


@contextmanager
def storing(config: Config) -> "Iterator[RunStore | None]":
    """Return a context with what uploads a run directory at a URL; None without one. Rank 0 starts it."""
    if config.run_dir is None or not is_url(config.run_dir):
        yield None
        return
    check(Job(config, elastic=is_elastic()))
    from hvdtrain.checkpoints.remote.run_store import RunStore  # most jobs do without

    store = RunStore(config.run_dir, run_folder(config.run_dir), config.keep_last, config.keep_best)
    try:
        yield store
    finally:
        store.close(0.0)  # if the job ended before it trained


def resumes_in_place(config: Config) -> bool:
    """Return whether to continue from the newest checkpoint of a run directory at a URL."""
    if config.run_dir is None or not is_url(config.run_dir):
        return False
    return config.resume in ("auto", config.run_dir, join(config.run_dir, CHECKPOINTS))


def publish(session: Session, status: str, signals: Signals) -> str:
    """Wait until a run directory at a URL has all that was written; return why it has not. Local."""
    limits = {"completed": _COMPLETED, "stopped": _STOPPED}.get(status, _ENDED_EARLY)
    store, say = session.services.saver.store, session.services.report.note
    if store is None or store.flush(lambda: limits if signals.number is None else min(limits, _STOPPED), say):
        return ""
    return store.problem()


def published(saver: Saver) -> tuple[str | None, str | None]:
    """Return the newest checkpoint as users find it, and why it is not the newest that was written. Local."""
    store, newest = saver.store, saver.newest
    if store is None:
        return (None if newest is None else str(newest)), None
    if newest is None or newest.name in store.whole:
        return store.newest_whole(), None
    return store.newest_whole(), f"{store.problem()}; {newest} has the state of its step"


def end_uploads(saver: Saver, report: Report, seconds: float = _LAST_SECONDS) -> None:
    """Upload what was written last, and let other jobs have the run directory. Local: rank 0 has one."""
    store, saver.store = saver.store, None
    if store is None:
        return
    if not store.close(seconds):
        where = f"{store.folder} on this host has all of it; the same command with --resume uploads it"
        report.note(f"{store.problem()}; {where} to {shown(store.url)}")
    elif left := store.left_out():
        report.note(f"{store.folder} stays, as these are not in the store: {', '.join(sorted(left)[:4])}")
    else:
        shutil.rmtree(store.folder, ignore_errors=True)
