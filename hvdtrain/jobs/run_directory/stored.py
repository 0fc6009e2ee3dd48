"""Run directories at URLs: what a job does with one before, while and after it trains."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.checkpoints import verification
from hvdtrain.checkpoints.remote import fetched
from hvdtrain.checkpoints.saver import Saver
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.launcher import is_elastic
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.failures import Signals
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.reporting.report import Report
from hvdtrain.session import Session
from hvdtrain.storage.files import run_folder
from hvdtrain.storage.urls import StoreError, is_url, join, shown
from hvdtrain.workers.agreement import Workers, run_on_rank_zero

if TYPE_CHECKING:
    from hvdtrain.checkpoints.remote.run_store import RunStore

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


def begin_in_store(config: Config, workers: Workers, store: "RunStore | None") -> list[str]:
    """Collective. Claim a run directory at a URL; bring its working copy to where the run stands."""
    if store is None:
        return []

    def begin() -> list[str]:
        try:
            return store.begin(_resumes_in_place(config))
        except StoreError as error:
            raise EnvironmentFault(f"run_dir: {error.problem}", error.remedy) from None
        except OSError as error:
            raise EnvironmentFault(f"cannot make the working copy of {shown(store.url)}: {error}") from None

    return run_on_rank_zero(workers, begin, doing="reading the run directory in the store")


def _resumes_in_place(config: Config) -> bool:
    """Return whether to continue from the newest checkpoint of a run directory at a URL."""
    if config.run_dir is None or not is_url(config.run_dir):
        return False
    return config.resume in ("auto", config.run_dir, join(config.run_dir, CHECKPOINTS))


def resumed_checkpoint(config: Config) -> Checkpoint:
    """Find the checkpoint that ``resume`` names, verified; rank 0 has fetched or fetches one at a URL."""
    assert config.resume is not None
    if _resumes_in_place(config):
        return verification.locate(run_folder(config.run_dir))
    return fetched.locate(config.resume)


def origin_of(config: Config, path: Path) -> str:
    """Return where a checkpoint is that a run starts from, as users know it."""
    folder = run_folder(config.run_dir)
    if config.run_dir is None or not is_url(config.run_dir) or not path.is_relative_to(folder):
        return str(path)
    return shown(join(config.run_dir, *path.relative_to(folder).parts))


def publish(session: Session, status: str, signals: Signals) -> str:
    """Wait until a run directory at a URL has all that was written; return why it has not. Local."""
    limits, store = (
        {"completed": _COMPLETED, "stopped": _STOPPED}.get(status, _ENDED_EARLY),
        session.services.saver.store,
    )
    say = session.services.report.note
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
