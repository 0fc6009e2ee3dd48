"""The files of a run in an object store, where a checkpoint without a manifest does not exist."""

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.checkpoints import manifest as manifests
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.remote.claim import CLAIM_FILE
from hvdtrain.checkpoints.storage import FOLDER, MANIFEST_FILE, MODEL_FILE, NAME, OPTIMIZER_FILE, Checkpoint
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.reporting.lock_state import LOCK_FILE
from hvdtrain.storage import urls
from hvdtrain.storage.files import cache_folder
from hvdtrain.storage.text import name_place

SCRATCH = ".store"  # in a working copy: the uploads' own
_FILES = (MODEL_FILE, OPTIMIZER_FILE)
_NOT_FETCHED = (CLAIM_FILE, FOLDER, "exports", "evaluations.jsonl", "predictions", "profile")
_folders: list[tempfile.TemporaryDirectory[str]] = []  # which are removed at the end of the process
_LISTINGS = 3  # if checkpoints are removed while they are fetched
_OLD_SECONDS = 24 * 3600.0  # after which the copies of a process that was killed are removed


def names_in(folder: str) -> list[str]:
    """Return the names of the folders of checkpoints in a folder, whole or not, the newest last."""
    found = [urls.name(one.url) for one in urls.entries(folder) if one.is_folder]
    return sorted((one for one in found if NAME.fullmatch(one)), key=storage.step_of)


def manifest_of(url: str) -> Manifest | None:
    """Return the manifest of a checkpoint; None if it has none, and so does not exist."""
    content = _manifest_content(url)
    return None if content is None else manifests.parse(content, MANIFEST_FILE, urls.shown(url))


def _manifest_content(url: str) -> bytes | None:
    try:
        return urls.read(urls.join(url, MANIFEST_FILE), manifests.MAX_BYTES)[0]
    except urls.MissingObjectError:
        return None
    except urls.ChangedObjectError as error:
        raise CorruptCheckpoint(str(error)) from None


def fetch(url: str, folder: Path) -> Path:
    """Download a checkpoint into a folder, where it replaces one of that name; return its directory."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = storage.unfinished(folder, urls.name(url))
    partial.mkdir()
    try:
        for file in (MANIFEST_FILE, *_FILES):
            try:
                urls.download(urls.join(url, file), partial / file)
            except urls.MissingObjectError:
                raise CorruptCheckpoint(f"{file} is missing") from None
        storage.verify(partial)
        return storage.put_in_place(partial, folder / urls.name(url))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put(source: Path, url: str, check: Callable[[], None]) -> Manifest:
    """Upload a checkpoint: its files, then its manifest, which is returned. Until then it does not exist."""
    manifest = storage.verify(source).manifest
    content, place = (source / MANIFEST_FILE).read_bytes(), urls.join(url, MANIFEST_FILE)
    try:
        old = _manifest_content(url)
    except CorruptCheckpoint:
        old = b""
    if old == content:  # which came after its files
        return manifest
    if old is not None:
        check()
        urls.remove(place)
    for file in _FILES:
        check()
        urls.upload(source / file, urls.join(url, file))
    check()
    urls.write(place, content)
    return manifest


def set_aside(url: str) -> str:
    """Rename a checkpoint so that nobody takes it for one; return its new name."""
    folder = url.rpartition("/")[0]
    names = (f"set-aside-{urls.name(url)}{f'-{number}' if number else ''}" for number in itertools.count())
    new = next(one for one in names if not urls.entries(urls.join(folder, one)))
    for one in urls.entries(url):
        _, place = urls.file_system(urls.join(folder, new, urls.name(one.url)))
        urls.request(one.url, "copied", "cp_file", place)
    delete(url)
    return new


def delete(url: str) -> None:
    """Delete a checkpoint: its manifest first, so that one that is half deleted does not exist."""
    urls.remove(urls.join(url, MANIFEST_FILE))
    urls.remove(url, is_folder=True)


def fetch_logs(url: str, folder: Path) -> None:
    """Download the files of a run that are no checkpoints and that are not in its working copy."""
    for top in urls.entries(url):
        if urls.name(top.url).startswith(".") or urls.name(top.url) in _NOT_FETCHED:
            continue
        for one in urls.objects_below(top.url) if top.is_folder else [top]:
            parts = one.url[len(url) :].strip("/").split("/")
            path = folder.joinpath(*parts)
            if {"", ".", ".."}.isdisjoint(parts) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                urls.download(one.url, path)


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


def locate(place: Path | str) -> Checkpoint:
    """Find the checkpoint that a user names by a path or a URL, verified; of a run its newest good one."""
    if not urls.is_url(place):
        return storage.locate(Path(place))
    return _newest(str(place), is_fetched=True)


def find_unverified(url: str) -> Checkpoint:
    """Return the checkpoint at a URL, or the newest one of the run there, by its manifest alone."""
    return _newest(url, is_fetched=False)


def _newest(url: str, is_fetched: bool) -> Checkpoint:
    """Return the first checkpoint there that can be read."""
    with reading(url):
        for _ in range(_LISTINGS):
            problems: list[str] = []
            is_removed = False  # by its run, meanwhile
            for one in _candidates(url):
                try:
                    if (manifest := manifest_of(one)) is not None:
                        path = _place(one)
                        if is_fetched:
                            fetch(one, path.parent)
                        return Checkpoint(path, manifest, tuple(problems))
                except CorruptCheckpoint as corruption:
                    is_removed |= not _is_whole(one)
                    problems.append(f"{urls.name(one)}: {corruption}")
            if not is_removed:
                break
    raise storage.none_in(urls.shown(url), "URL", problems)


def manifests_in(url: str) -> dict[str, Manifest]:
    """Return the manifests of the checkpoints of a run at a URL, by URL, the newest last; no damaged ones."""
    found: dict[str, Manifest | None] = {}
    with reading(url):
        for one in reversed(_candidates(url)):
            with suppress(CorruptCheckpoint, EnvironmentFault):
                found[one] = manifest_of(one)
    return {one: manifest for one, manifest in found.items() if manifest}


def _candidates(url: str) -> list[str]:
    """Return the URL of the checkpoint that is named, or of those of a run, the newest first."""
    if NAME.fullmatch(urls.name(url)) or _is_whole(url):
        return [url]
    for folder in (urls.join(url, FOLDER), url):
        if names := names_in(folder):
            return [urls.join(folder, one) for one in reversed(names)]
    return []


def _is_whole(url: str) -> bool:
    return any(urls.name(one.url) == MANIFEST_FILE for one in urls.entries(url))


def _place(url: str) -> Path:
    """Return a new path for a copy, whose folder exists, and which texts name by the URL."""
    place = cache_folder().absolute() / "reading"
    place.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        for old in place.iterdir():  # of processes that were killed
            if time.time() - old.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True)
    _folders.append(folder)
    path = Path(folder.name) / (urls.name(url).strip(".") or "run")
    name_place(path, urls.shown(url))
    return path


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Return a context in which what a store or this host's disk refuses is the environment's fault."""
    try:
        yield
    except urls.StoreError as error:
        is_missing = isinstance(error, urls.MissingObjectError)
        raise (CheckpointError if is_missing else EnvironmentFault)(error.problem, error.remedy) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{urls.shown(url)} cannot be fetched into {cache_folder()}: {error.strerror or error}",
            "Free space there, or name another folder with HVDTRAIN_CACHE.",
        ) from None
