"""Checkpoints at URLs, for those who only read them: fetched into the cache, verified and kept there.

A copy is kept under the checkpoint's URL and the content of its manifest, so that one which was replaced
in the store is fetched anew. Any number of processes may fetch at once: what is whole is renamed into its
place.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from hvdtrain.checkpoints import manifest as manifests
from hvdtrain.checkpoints import verification
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.remote.stored_checkpoints import FOLDER, StoredCheckpoints
from hvdtrain.checkpoints.storage import MANIFEST_FILE, NAME, Checkpoint
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.storage.files import cache_folder
from hvdtrain.storage.text import name_place, url_of
from hvdtrain.storage.urls import (
    MissingBucketError,
    MissingObjectError,
    StoreError,
    entries,
    is_url,
    join,
    name,
    parent,
    shown,
)

_KEPT = 4  # copies that are kept for the next time
_USED_SECONDS = 3600.0  # after which a copy can be removed: nobody reads it any more
_FETCHING_SECONDS = 24 * 3600.0  # after which what is not whole is nobody's
_UNFINISHED = ".new-"
_MOST_NAME_BYTES, _CUT_NAME_BYTES = 200, 100  # of the name of a copy: file systems take 255, stores more
_LISTINGS = 3  # if checkpoints are removed while they are fetched


def locate(place: Path | str) -> Checkpoint:
    """Find the checkpoint that a user names by a path or a URL, verified; of a run its newest good one.

    Raises:
        CheckpointError: If there is none, or the one that was named is corrupt.
        EnvironmentFault: If it cannot be read, or not be kept here.
    """
    return fetch(str(place)) if is_url(place) else verification.locate(Path(place))


def fetch(url: str) -> Checkpoint:
    """Return a verified copy of the checkpoint at a URL, or of the newest good one of the run there.

    Raises:
        CheckpointError: If there is none, or the one that was named is corrupt.
        EnvironmentFault: If it cannot be fetched.
    """
    with _reading_checkpoints(url):
        for _ in range(_LISTINGS):
            problems: list[str] = []
            removed = False
            for one in _candidates(url):
                try:
                    found = _fetched(one)
                except CorruptCheckpoint as corruption:
                    removed = removed or not _is_whole(one)  # by its run, meanwhile
                    problems.append(f"{name(one)}: {corruption}")
                    continue
                if found is not None:
                    return Checkpoint(found.path, found.manifest, tuple(problems))
            if not removed:
                break
    raise _none_at(url, problems)


def find_unverified(url: str) -> Checkpoint:
    """Return the checkpoint at a URL, or the newest one of the run there, by its manifest alone.

    Its path is where ``fetch`` puts the copy; there may be none yet.

    Raises:
        CheckpointError: If there is none whose manifest can be read.
        EnvironmentFault: If the store cannot be read.
    """
    problems: list[str] = []
    with _reading_checkpoints(url):
        for one in _candidates(url):
            try:
                content = _stored(one).manifest_bytes(name(one))
                if content is not None:
                    manifest = manifests.parse(content, MANIFEST_FILE, shown(one))
                    return Checkpoint(_place(one, content), manifest)
            except CorruptCheckpoint as corruption:
                problems.append(f"{name(one)}: {corruption}")
    raise _none_at(url, problems)


def manifests_in(url: str) -> dict[str, Manifest]:
    """Return what the checkpoints of a run at a URL say of themselves, by URL, the newest last.

    Damaged ones are left out.

    Raises:
        EnvironmentFault: If the store cannot be read.
    """
    found: dict[str, Manifest] = {}
    with _reading_checkpoints(url):
        for one in reversed(_candidates(url)):
            with suppress(CorruptCheckpoint, EnvironmentFault):
                if (manifest := _stored(one).manifest(name(one))) is not None:
                    found[one] = manifest
    return found


def run_place_of(found: Checkpoint) -> Path | str:
    """Return the run directory that a checkpoint lies in, or its own folder: the URL of a copy's original."""
    url = url_of(found.path)
    folder: Path | str = parent(url) if url else found.path.parent
    if isinstance(folder, str):
        return parent(folder) if name(folder) == FOLDER else folder
    return folder.parent if folder.name == FOLDER else folder


def local_name(url: str) -> str:
    """Return the last part of a URL, a long one cut, or another word if it cannot be a file's name."""
    last = name(url)
    if last in ("", ".", "..") or "\0" in last:
        return "run"
    content = last.encode(errors="surrogateescape")
    if len(content) <= _MOST_NAME_BYTES:
        return last
    return f"{content[:_CUT_NAME_BYTES].decode(errors='ignore')}-{hashlib.sha256(content).hexdigest()[:12]}"


def _candidates(url: str) -> list[str]:
    """Return the URL of the checkpoint that is named, or of those of a run, the newest first."""
    if NAME.fullmatch(name(url)) or _is_whole(url):
        return [url]
    for folder in (join(url, FOLDER), url):
        found = [one.url for one in entries(folder) if one.is_folder and NAME.fullmatch(name(one.url))]
        if found:
            return sorted(found, key=lambda one: int(name(one).rpartition("-")[2]), reverse=True)
    return []


def _is_whole(url: str) -> bool:
    return any(name(one.url) == MANIFEST_FILE for one in entries(url))


def _stored(url: str) -> StoredCheckpoints:
    """Return the checkpoints of the folder that one lies in."""
    found = StoredCheckpoints(url)
    found.url = parent(url)
    return found


def _fetched(url: str) -> Checkpoint | None:
    """Return a verified copy of a checkpoint; None if it does not exist.

    Raises:
        CorruptCheckpoint: If it is not what was written.
    """
    stored = _stored(url)
    content = stored.manifest_bytes(name(url))
    if content is None:
        return None
    path = _place(url, content)
    if path.is_dir():
        try:
            found = verification.verify(path)
            if (path / MANIFEST_FILE).read_bytes() != content:
                raise CorruptCheckpoint("it is another checkpoint than the one in the store")
        except CorruptCheckpoint:
            shutil.rmtree(path.parent, ignore_errors=True)
        else:
            os.utime(path.parent)
            return found
    own = path.parent.parent / f"{_UNFINISHED}{uuid4().hex}"
    try:
        fetched = stored.fetch(name(url), own)
        if (fetched / MANIFEST_FILE).read_bytes() != content:
            raise CorruptCheckpoint("it was replaced while it was read")
        path.parent.mkdir(exist_ok=True)
        try:
            fetched.rename(path)
        except OSError:
            if not path.is_dir():  # else another process has fetched it, too
                raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
    _remove_old(path.parent.parent, path.parent)
    return verification.verify(path)


def _place(url: str, content: bytes) -> Path:
    key = hashlib.sha256(url.encode() + b"\0" + content).hexdigest()[:32]
    path = cache_folder().absolute() / "checkpoints" / key / local_name(url)
    name_place(path, shown(url))
    return path


def _remove_old(folder: Path, spared: Path) -> None:
    """Remove the copies that were not used for longest, but for some, and what killed processes left."""
    with suppress(OSError):
        others = [path for path in folder.iterdir() if path != spared]
        ages = sorted((time.time() - path.stat().st_mtime, path) for path in others)
        whole = [(age, path) for age, path in ages if not path.name.startswith(_UNFINISHED)]
        for age_seconds, path in whole[_KEPT - 1 :]:
            if age_seconds > _USED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        for age_seconds, path in ages:
            if path.name.startswith(_UNFINISHED) and age_seconds > _FETCHING_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _none_at(url: str, problems: list[str]) -> CheckpointError:
    if NAME.fullmatch(name(url)):
        what = f"checkpoint {shown(url)} is damaged" if problems else f"there is no checkpoint {shown(url)}"
    else:
        what = f"no good checkpoint in {shown(url)}" if problems else f"no checkpoint in {shown(url)}"
    return CheckpointError(
        "; ".join([what, *problems[:4]]),
        "Give the URL of a run directory, or of a directory such as RUN_DIR/checkpoints/step-00000120.",
    )


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Return a context in which what a store or this host's disk refuses is the environment's fault."""
    try:
        yield
    except StoreError as error:
        raise EnvironmentFault(error.problem, error.remedy) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{shown(url)} cannot be fetched into {cache_folder()}: {error.strerror or error}",
            "Free space there, or name another folder with HVDTRAIN_CACHE.",
        ) from None


@contextmanager
def _reading_checkpoints(url: str) -> Iterator[None]:
    """Return a context as ``reading`` does, in which what does not exist is a missing checkpoint."""
    with reading(url):
        try:
            yield
        except MissingBucketError:
            raise
        except MissingObjectError as error:
            raise CheckpointError(error.problem, error.remedy) from None
