"""The files of a run in an object store. A checkpoint without a manifest does not exist there."""

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from hvdtrain.checkpoints import manifest as manifests
from hvdtrain.checkpoints import storage, verification
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.remote.claim import CLAIM_FILE
from hvdtrain.checkpoints.storage import FOLDER, MANIFEST_FILE, MODEL_FILE, NAME, OPTIMIZER_FILE
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import EnvironmentFault
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

_FILES = (MODEL_FILE, OPTIMIZER_FILE)
_NOT_FETCHED = (CLAIM_FILE, FOLDER, "exports", "evaluations.jsonl", "predictions", "profile")


class StoredCheckpoints:
    """The checkpoints in a folder at a URL, by name."""

    def __init__(self, url: str) -> None:
        self.url = url  # the folder
        # the manifests that ``look`` has found, the newest last; None of one that cannot be read
        self.known: dict[str, Manifest | None] = {}
        self._cut: list[str] = []  # without a manifest

    def names(self) -> list[str]:
        """Return the names of the folders of checkpoints, whole or not, the newest last."""
        found = [name(one.url) for one in entries(self.url) if one.is_folder]
        return sorted((one for one in found if NAME.fullmatch(one)), key=step_in)

    def manifest(self, checkpoint: str) -> Manifest | None:
        """Return the manifest of a checkpoint; None if it has none, and so does not exist.

        Raises:
            CorruptCheckpoint: If one byte of it is not as it was written.
            EnvironmentFault: If another version of hvdtrain wrote it.
        """
        content, place = self._content(checkpoint), shown(join(self.url, checkpoint))
        return None if content is None else manifests.parse(content, MANIFEST_FILE, place)

    def _content(self, checkpoint: str) -> bytes | None:
        try:
            return read(join(self.url, checkpoint, MANIFEST_FILE), manifests.MAX_BYTES)
        except MissingObjectError:
            return None
        except ChangedObjectError as error:
            raise CorruptCheckpoint(str(error)) from None

    def look(self) -> None:
        """Find the checkpoints that are there now."""
        known: dict[str, Manifest | None] = {}
        cut = []
        for one in self.names():
            try:
                if (found := self.known.get(one) or self.manifest(one)) is None:
                    cut.append(one)
                else:
                    known[one] = found
            except (CorruptCheckpoint, EnvironmentFault):
                known[one] = None
        self.known, self._cut = known, cut

    def superfluous(self, last: int, goal: MetricGoal | None, run_dir: str) -> list[str]:
        """Return which checkpoints need not be kept: such as a run wrote, and older ones without a manifest.

        The ``last`` newest of the run at the URL ``run_dir`` are kept, and the best by the metric ``goal``.
        """
        own = {one: m for one, m in self.known.items() if m and m.config.get("run_dir") == run_dir}
        if len(newest := list(own)[-last:]) < last:
            return []
        best, of_best = newest[-1], None
        for one, manifest in own.items():
            if goal is not None and goal.improves(value := manifest.metrics.get(goal.metric), of_best):
                best, of_best = one, value
        older = [one for one in self._cut if step_in(one) < step_in(newest[0])]
        return [*older, *(one for one in own if one not in (*newest, best))]

    def fetch(self, checkpoint: str, folder: Path) -> Path:
        """Download a checkpoint into a folder, which is made if need be, and verify it.

        Returns:
            Its directory; one of that name is replaced.

        Raises:
            CorruptCheckpoint: If it is not what was written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        partial = storage.unfinished(folder, checkpoint)
        partial.mkdir()
        try:
            for file in (MANIFEST_FILE, *_FILES):
                try:
                    download(join(self.url, checkpoint, file), partial / file)
                except MissingObjectError:
                    raise CorruptCheckpoint(f"{file} is missing") from None
            verification.verify(partial)
            return storage.put_in_place(partial, folder / checkpoint)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def put(self, source: Path, check: Callable[[], None]) -> None:
        """Upload a checkpoint: its files, then its manifest. Until then it does not exist.

        ``check`` is called before each object is written, and raises a StoreError if it must not be.

        Raises:
            CorruptCheckpoint: If what is in the directory is not what was written.
        """
        manifest = verification.verify(source).manifest
        content, place = (source / MANIFEST_FILE).read_bytes(), join(self.url, source.name)
        try:
            old = self._content(source.name)
        except CorruptCheckpoint:
            old = b""
        if old == content:  # which came after its files
            self.known[source.name] = manifest
            return
        if old is not None:
            check()
            remove(join(place, MANIFEST_FILE))
        for file in _FILES:
            check()
            upload(source / file, join(place, file))
        check()
        write(join(place, MANIFEST_FILE), content)
        self.known[source.name] = manifest

    def set_aside(self, checkpoint: str) -> str:
        """Rename a checkpoint so that nobody takes it for one; return its new name."""
        taken = {name(one.url) for one in entries(self.url)}
        new, number = f"set-aside-{checkpoint}", 1
        while new in taken:
            number += 1
            new = f"set-aside-{checkpoint}-{number}"
        for one in entries(join(self.url, checkpoint)):
            request(one.url, "copied", "cp_file", file_system(join(self.url, new, name(one.url)))[1])
        self.delete(checkpoint)
        return new

    def delete(self, checkpoint: str) -> None:
        """Delete a checkpoint: its manifest first, so that one that is half deleted does not exist."""
        remove(join(self.url, checkpoint, MANIFEST_FILE))
        remove(join(self.url, checkpoint), is_folder=True)
        self.known.pop(checkpoint, None)


def step_in(checkpoint: str) -> int:
    """Return the step in the name of a checkpoint."""
    return storage.step_of(Path(checkpoint))


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


def left_out_of(folder: Path, own: Collection[str]) -> list[str]:
    """Return what lies in a run directory in addition to its checkpoints and is not uploaded, such as links.

    ``own`` names what in it is the job's own, such as its lock.
    """
    uploaded, found = {path for path, _ in logs_in(folder)}, list[Path]()
    for place, folders, files in os.walk(folder):
        is_top = Path(place) == folder
        skipped = {FOLDER, *own, *(one for one in folders if one.startswith("sending-"))} if is_top else set()
        links = [one for one in folders if Path(place, one).is_symlink()]
        found += [Path(place, one) for one in (*links, *files) if one not in skipped]
        folders[:] = [one for one in folders if one not in skipped]
    return [str(path.relative_to(folder)) for path in found if path not in uploaded]


def logs_in(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Return the files of a run directory that are no checkpoints, locks, links or hidden; with versions."""
    for place, folders, files in os.walk(folder):
        left_out = (FOLDER,) if Path(place) == folder else ()
        folders[:] = [one for one in folders if not one.startswith((".", "sending-")) and one not in left_out]
        for path in (Path(place, one) for one in files):
            if not path.name.startswith(".") and path.suffix != ".lock" and not path.is_symlink():
                status = path.stat()
                yield path, (status.st_size, status.st_mtime_ns)
