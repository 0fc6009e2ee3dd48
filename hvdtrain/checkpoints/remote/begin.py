"""Before a job trains in a run directory at a URL: where the run stands is found out, and it is fetched."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hvdtrain.checkpoints import storage, verification
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.remote.stored_checkpoints import (
    FOLDER,
    LogFiles,
    StoredCheckpoints,
    never_uploaded,
    step_in,
    value_of,
)
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import CheckpointError, ConfigError, EnvironmentFault
from hvdtrain.reporting.jsonl import write_json
from hvdtrain.reporting.lock_state import LOCK_FILE
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.storage.files import open_regular, read_regular
from hvdtrain.storage.urls import StoreError, entries, name, shown

SCRATCH = ".store"
RUN_FILES = ("metrics.jsonl", "summary.json", FOLDER)  # if a directory has one of them, it holds a run
_STATE, _LOCK = "state.json", "upload.lock"
_MAX_BYTES = 1 << 16
_LOCK_SECONDS = 90.0
_LOOK_SECONDS = 0.2
_BLOCK_BYTES = 1 << 20


@dataclass
class CopyState:
    """What a working copy knows of the store; ``.store/state.json``.

    Attributes:
        url: the run directory.
        claim: the claim of the last job here, which has ended when another process has the copy's lock.
        writers: claims of the last jobs that changed the run in the store and whose work is here.
        is_uploaded: whether the store had all that is here when the last job here ended.
        later: checkpoints in the store that are of a later step than the run went back to, and are to be set
            aside there before anything is uploaded.
    """

    url: str = ""
    claim: str = ""
    writers: list[str] = field(default_factory=list)
    is_uploaded: bool = False
    later: list[str] = field(default_factory=list)


class WorkingCopy:
    """The working copy of a run directory at a URL, an existing folder. One process at a time uploads it.

    Attributes:
        scratch: a folder in it for what is not part of the run.
        state: what it knows of the store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch = folder, folder / SCRATCH
        self.scratch.mkdir(exist_ok=True)
        self._lock = os.open(self.scratch / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.state = self._read()

    def lock(self) -> None:
        """Wait until the process of the job before has ended, which uploads what is left.

        Raises:
            EnvironmentFault: If it does not end.
        """
        until_seconds = time.monotonic() + _LOCK_SECONDS
        try:
            while not self._is_locked():
                if time.monotonic() > until_seconds:
                    raise EnvironmentFault(
                        f"the job before still uploads {self.folder}", "Wait until its process has ended."
                    )
                time.sleep(_LOOK_SECONDS)
            self.state = self._read()
        except OSError:  # a file system without locks: who has the copy is not known
            self.state = replace(self._read(), claim="")

    def _is_locked(self) -> bool:
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def unlock(self) -> None:
        """Let other processes upload it."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def write_state(self) -> None:
        """Write down what it knows of the store; raises an OSError if it cannot be written."""
        write_json(self.scratch / _STATE, asdict(self.state))

    def holds_run(self) -> bool:
        """Return whether there is a run in it."""
        return any((self.folder / name).exists() for name in RUN_FILES)

    def steps(self) -> list[str]:
        """Return the names of the checkpoints in it, good or not, the newest last."""
        return [path.name for path in storage.checkpoints_in(self.folder / FOLDER)]

    def move_aside(self) -> Path:
        """Move the run in it to a directory beside it, which is returned."""
        number = 1
        while (beside := self.folder.with_name(f"{self.folder.name}-set-aside-{number}")).exists():
            number += 1
        beside.mkdir()
        for path in [path for path in self.folder.iterdir() if path.name not in (SCRATCH, LOCK_FILE)]:
            path.rename(beside / path.name)
        return beside

    def _read(self) -> CopyState:
        with suppress(OSError, ValueError, TypeError, RecursionError):
            return CopyState(**json.loads(read_regular(self.scratch / _STATE, _MAX_BYTES)))
        return CopyState()


AUTO, NEW = "auto", ""  # continue if there is a run; there must be none


@dataclass(frozen=True)
class StoredRun:
    """A run directory at a URL, whose claim the caller has, and its working copy, locked."""

    url: str
    copy: WorkingCopy
    checkpoints: StoredCheckpoints
    logs: LogFiles  # its other files
    note: Callable[[str], None] = lambda text: None  # called at once with what takes long


@dataclass
class Begun:
    """Where a run stands when a job begins.

    Attributes:
        notes: what the user should know.
        values: the metric that keep_best names, by the name of a checkpoint in the store.
        newest: the newest good checkpoint, which is in the working copy; empty if there is none.
        passed_over: newer ones in the store that did not verify as they were read; they stay as they are.
    """

    notes: list[str] = field(default_factory=list)
    values: dict[str, float | None] = field(default_factory=dict)
    newest: str = ""
    passed_over: list[str] = field(default_factory=list)


def begin(
    run: StoredRun, writer: str, resume: str, goal: MetricGoal | None = None
) -> tuple[Begun, dict[str, Manifest]]:
    """Bring the working copy to where the run stands.

    Args:
        run: the run directory.
        writer: the claim of the last job that changed the run, as the store says; empty if it does not.
        resume: ``NEW``, ``AUTO``, or the name of the checkpoint that the run is to continue from.
        goal: the metric that keep_best names.

    Returns:
        Where the run stands, and the manifests of the checkpoints in the store.

    Raises:
        ConfigError: If there is a run that the job does not continue.
        CheckpointError: If the checkpoint that was named is missing or damaged, or all in the store are.
        EnvironmentFault: If a checkpoint cannot be read.
        StoreError: If the store cannot be read.
        OSError: If the working copy cannot be written.
    """
    begun, url, copy = Begun(), run.url, run.copy
    found = {name(one.url) for one in entries(url)}
    is_stored = not found.isdisjoint(RUN_FILES)
    is_own = not is_stored or writer in copy.state.writers
    if resume == NEW:
        _check_is_free(url, copy, found, begun)
        copy.state.later = []
        return begun, {}
    beside = copy.move_aside() if copy.holds_run() and not is_own else None
    was_uploaded = copy.state.is_uploaded
    if not is_own:  # from here on the copy is one of what the store has, as far as it gets
        copy.state.writers, copy.state.is_uploaded = [writer] if writer else [], True
        copy.state.later = []
        copy.write_state()
    if is_stored:
        run.logs.fetch()
    if beside is not None:
        _give_way(beside, copy.folder, was_uploaded, begun)
    manifests = _manifests(run, begun)
    begun.newest = _fetch_newest(run, manifests, resume, begun)
    if goal is not None:
        begun.values = {one: value_of(manifest, goal) for one, manifest in manifests.items()}
    return begun, manifests


def _check_is_free(url: str, copy: WorkingCopy, found: set[str], begun: Begun) -> None:
    """Raise a ConfigError if there is a run in the store, or one in the copy that was never there."""
    if held := [one for one in RUN_FILES if one in found]:
        raise ConfigError(
            f"run_dir: {shown(url)} already holds a run ({held[0]})",
            "Add --resume to continue it, choose another --run-dir, or move it away.",
        )
    if copy.holds_run() and not copy.state.is_uploaded:
        raise ConfigError(
            f"run_dir: {copy.folder} on this host holds a run of {shown(url)} that is not in the store",
            "Add --resume to continue and upload it, choose another --run-dir, or remove that directory.",
        )
    if copy.holds_run():
        text = f"{shown(url)} no longer has the run that this host has a copy of: the copy is moved to "
        begun.notes.append(f"{text}{copy.move_aside()}")


def _give_way(beside: Path, folder: Path, was_uploaded: bool, begun: Begun) -> None:
    """Remove a copy that was moved aside as the run went on elsewhere, if the store's run continues it."""
    is_continued = begins_with(folder / METRICS_FILE, beside / METRICS_FILE)
    if was_uploaded and is_continued and not never_uploaded(beside):
        shutil.rmtree(beside, ignore_errors=True)
        return
    why = "which it does not continue" if was_uploaded else "of which not all was uploaded"
    begun.notes.append(
        f"the run went on elsewhere since this host's copy of it, {why}: that copy is set aside as {beside}"
    )


def begins_with(whole: Path, part: Path) -> bool:
    """Return whether a file begins with all that another one has."""
    try:
        with open_regular(whole, follow=False) as file, open_regular(part, follow=False) as other:
            while block := other.read(_BLOCK_BYTES):
                if file.read(len(block)) != block:
                    return False
    except OSError:
        return False
    return True


def _manifests(run: StoredRun, begun: Begun) -> dict[str, Manifest]:
    """Return the manifests of the checkpoints in the store, but for such as the run has gone back from."""
    found: dict[str, Manifest] = {}
    names = run.checkpoints.names()
    run.copy.state.later = later = [one for one in run.copy.state.later if one in names]
    for one in [one for one in names if one not in later]:
        try:
            if (manifest := run.checkpoints.manifest(one)) is not None:
                found[one] = manifest
        except CorruptCheckpoint as corruption:
            _pass_over(run, one, corruption, begun)
    return found


def _fetch_newest(run: StoredRun, manifests: dict[str, Manifest], resume: str, begun: Begun) -> str:
    """Bring the newest good checkpoint into the working copy, and return its name; empty if there is none."""
    folder, local, place = run.copy.folder / FOLDER, run.copy.steps(), shown(run.checkpoints.url)
    names = sorted({*local, *manifests}, key=step_in)
    if resume != AUTO and resume not in names:
        known = f"There are: {', '.join(names[-4:])}." if names else ""
        raise CheckpointError(f"there is no checkpoint {place}/{resume}", known)
    for one in reversed(names if resume == AUTO else [resume]):
        if one in local and _is_good_here(folder / one, begun):
            if one not in manifests:
                note = f"{one} is not in {shown(run.url)} yet: it is uploaded from {run.copy.folder}"
                begun.notes.append(note)
            return one
        if one not in manifests:
            continue
        run.note(f"downloading {place}/{one}")
        try:
            run.checkpoints.fetch(one, folder)
            return one
        except CorruptCheckpoint as corruption:
            if resume != AUTO:
                raise CheckpointError(f"checkpoint {place}/{one} is damaged: {corruption}") from None
            _pass_over(run, one, corruption, begun)
            del manifests[one]
    if begun.passed_over:
        raise CheckpointError(
            f"no checkpoint in {place} verifies: {'; '.join(begun.notes[-4:])}",
            "They were left as they are. Try again, also on another host, or choose another --run-dir.",
        )
    return ""


def _is_good_here(path: Path, begun: Begun) -> bool:
    """Return whether a checkpoint in the working copy is good; set it aside if it is not."""
    try:
        verification.verify(path)
    except CorruptCheckpoint as corruption:
        begun.notes.append(f"checkpoint {path} is damaged: {corruption}; {storage.quarantine(path)}")
        return False
    return True


def _pass_over(run: StoredRun, one: str, corruption: CorruptCheckpoint, begun: Begun) -> None:
    """Do without a checkpoint in the store, which stays: this host may have read it wrongly."""
    begun.passed_over.append(one)
    begun.notes.append(
        f"checkpoint {shown(run.checkpoints.url)}/{one} is damaged: {corruption}; it is passed over"
    )


def problem_of(error: Exception, url: str) -> dict[str, str]:
    """Return an error as the process that begins reports it to the job: its kind, problem and remedy."""
    problem, remedy = f"run_dir: {shown(url)}: {type(error).__name__}: {error}", ""
    for kind in (ConfigError, CheckpointError, EnvironmentFault):
        if isinstance(error, kind):
            return {"kind": kind.__name__, "problem": error.problem, "remedy": error.remedy}
    if isinstance(error, StoreError):
        problem, remedy = f"run_dir: {error.problem}", error.remedy
    return {"kind": EnvironmentFault.__name__, "problem": problem, "remedy": remedy}
