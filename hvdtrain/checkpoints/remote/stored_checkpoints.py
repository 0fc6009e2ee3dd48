"""The files of a run in an object store. A checkpoint without a manifest does not exist there."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.checkpoints import manifest as manifests
from hvdtrain.checkpoints import storage, verification
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.remote.claim import CLAIM_FILE
from hvdtrain.checkpoints.storage import FOLDER, MANIFEST_FILE, MODEL_FILE, NAME, OPTIMIZER_FILE
from hvdtrain.reporting.lock_state import LOCK_FILE
from hvdtrain.storage.urls import (
    ChangedObjectError,
    MissingObjectError,
    download,
    entries,
    file_system,
    join,
    name,
    objects_below,
    read,
    remove,
    request,
    shown,
    upload,
    write,
)

SCRATCH = ".store"  # in a working copy: the uploads' own
_FILES = (MODEL_FILE, OPTIMIZER_FILE)
_NOT_FETCHED = (CLAIM_FILE, FOLDER, "exports", "evaluations.jsonl", "predictions", "profile")


def names_in(folder: str) -> list[str]:
    """Return the names of the folders of checkpoints in a folder, whole or not, the newest last."""
    found = [name(one.url) for one in entries(folder) if one.is_folder]
    return sorted((one for one in found if NAME.fullmatch(one)), key=step_in)


def step_in(checkpoint: str) -> int:
    """Return the step in the name of a checkpoint."""
    return storage.step_of(Path(checkpoint))


def manifest_of(url: str) -> Manifest | None:
    """Return the manifest of a checkpoint; None if it has none, and so does not exist."""
    content = _manifest_content(url)
    return None if content is None else manifests.parse(content, MANIFEST_FILE, shown(url))


def _manifest_content(url: str) -> bytes | None:
    try:
        return read(join(url, MANIFEST_FILE), manifests.MAX_BYTES)[0]
    except MissingObjectError:
        return None
    except ChangedObjectError as error:
        raise CorruptCheckpoint(str(error)) from None


def fetch(url: str, folder: Path) -> Path:
    """Download a checkpoint into a folder, where it replaces one of that name; return its directory."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = storage.unfinished(folder, name(url))
    partial.mkdir()
    try:
        for file in (MANIFEST_FILE, *_FILES):
            try:
                download(join(url, file), partial / file)
            except MissingObjectError:
                raise CorruptCheckpoint(f"{file} is missing") from None
        verification.verify(partial)
        return storage.put_in_place(partial, folder / name(url))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put(source: Path, url: str, check: Callable[[], None]) -> Manifest:
    """Upload a checkpoint: its files, then its manifest, which is returned. Until then it does not exist."""
    manifest = verification.verify(source).manifest
    content, place = (source / MANIFEST_FILE).read_bytes(), join(url, MANIFEST_FILE)
    try:
        old = _manifest_content(url)
    except CorruptCheckpoint:
        old = b""
    if old == content:  # which came after its files
        return manifest
    if old is not None:
        check()
        remove(place)
    for file in _FILES:
        check()
        upload(source / file, join(url, file))
    check()
    write(place, content)
    return manifest


def set_aside(url: str) -> str:
    """Rename a checkpoint so that nobody takes it for one; return its new name."""
    folder = url.rpartition("/")[0]
    names = (f"set-aside-{name(url)}{f'-{number}' if number else ''}" for number in itertools.count())
    new = next(one for one in names if not entries(join(folder, one)))
    for one in entries(url):
        request(one.url, "copied", "cp_file", file_system(join(folder, new, name(one.url)))[1])
    delete(url)
    return new


def delete(url: str) -> None:
    """Delete a checkpoint: its manifest first, so that one that is half deleted does not exist."""
    remove(join(url, MANIFEST_FILE))
    remove(url, is_folder=True)


def fetch_logs(url: str, folder: Path) -> None:
    """Download the files of a run that are no checkpoints and that are not in its working copy."""
    for top in entries(url):
        if name(top.url).startswith(".") or name(top.url) in _NOT_FETCHED:
            continue
        for one in objects_below(top.url) if top.is_folder else [top]:
            parts = one.url[len(url) :].strip("/").split("/")
            path = folder.joinpath(*parts)
            if {"", ".", ".."}.isdisjoint(parts) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                download(one.url, path)


def files_in(folder: Path) -> Iterator[Path]:
    """Return the files and links of a working copy, but not its lock and what is being sent."""
    for place, folders, files in os.walk(folder):
        links = [one for one in folders if Path(place, one).is_symlink()]
        own = (SCRATCH, "sending-", ".new-", ".removed-")
        folders[:] = [one for one in folders if not one.startswith(own)]
        yield from (Path(place, one) for one in (*files, *links) if one != LOCK_FILE)


def logs_in(folder: Path) -> Iterator[Path]:
    """Return the files of a working copy that are no checkpoints, locks, links or hidden."""
    for path in files_in(folder):
        inner = path.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in inner)
        if inner[0] != FOLDER and not is_hidden and path.suffix != ".lock" and not path.is_symlink():
            yield path
