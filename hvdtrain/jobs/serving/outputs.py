"""What commands write in addition to runs, to a path or a URL: whole or not there, and over nothing else."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from hvdtrain.checkpoints.remote.fetched import reading
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.storage.files import cache_folder, check_url
from hvdtrain.storage.urls import (
    MissingObjectError,
    StoreError,
    download,
    info,
    is_url,
    join,
    name,
    objects_below,
    parent,
    remove,
    shown,
    upload,
)

Place = Path | str  # the text is a URL
_MOST_NAME_BYTES = 200  # of a file's name, in addition to which there are others with longer ones
_MARK = "saved_model.pb"  # of a folder that TensorFlow wrote


def is_there(place: Place) -> bool:
    """Return whether there is a file, a folder or an object.

    Raises:
        EnvironmentFault: If the store cannot be queried.
    """
    if not isinstance(place, str):
        return place.exists()
    with _store_faults():
        try:
            info(place)
        except MissingObjectError:
            return False
    return True


def suffix_of(place: Place) -> str:
    """Return how the name of a file or an object ends, such as ".npz"."""
    return PurePosixPath(name(str(place))).suffix


def holds_saved_model(place: Place) -> bool:
    """Return whether a folder is what TensorFlow wrote."""
    return is_there(join(place, _MARK) if isinstance(place, str) else place / _MARK)


def check_not_there(output: Place, force: bool, may_be_folder: bool = False) -> None:
    """Check that nothing is lost when a file is written.

    Raises:
        UsageError: If it exists and may not be replaced.
        EnvironmentFault: If the store cannot be queried.
    """
    if not is_there(output):
        return
    if not force:
        raise UsageError(f"{shown(output)} exists", "Give another --output, or --force to replace it.")
    with _store_faults():
        is_folder = info(output).is_folder if isinstance(output, str) else output.is_dir()
    if is_folder and not may_be_folder:
        raise UsageError(f"{shown(output)} is a directory, and no export: --force does not replace it")


@contextmanager
def local_file(place: Place) -> Iterator[Path]:
    """Return a context with the path of a file; of one at a URL, a copy with the same name.

    Raises:
        CheckpointError: If there is no such object.
        EnvironmentFault: If it cannot be fetched.
    """
    if not isinstance(place, str):
        yield place
        return
    with written_beside(place) as path:
        with reading(place):
            download(place, path)
        yield path


@contextmanager
def written_beside(output: Place) -> Iterator[Path]:
    """Return a context with a path of the same name in a folder next to; the folder is removed at its end.

    For a URL the folder is in the cache.

    Raises:
        UsageError: If the name is longer than a file's can be here.
        EnvironmentFault: If the folder cannot be made.
    """
    if len(os.fsencode(name(str(output)))) > _MOST_NAME_BYTES:
        raise UsageError(
            f"{shown(output)}: its last part is longer than {_MOST_NAME_BYTES} bytes", "Give a shorter name."
        )
    try:
        if isinstance(output, str):
            beside = cache_folder() / "outputs"
            beside.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir=beside))
        else:
            folder = output.with_name(f".new-{output.name}")
            output.parent.mkdir(parents=True, exist_ok=True)
            if folder.is_symlink():
                folder.unlink()
            elif folder.exists():
                shutil.rmtree(folder)  # what a killed export left
            folder.mkdir()
    except OSError as error:
        raise EnvironmentFault(f"cannot write {shown(output)}: {error.strerror or error}") from None
    try:
        yield folder / name(str(output))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_into_place(written: Path, output: Place) -> None:
    """Rename or upload what was written, and what lies next to it for it; what was there is removed.

    Raises:
        EnvironmentFault: If it cannot be written.
    """
    # the file itself last: it needs the others
    for part in sorted(written.parent.iterdir(), key=lambda part: part == written):
        if isinstance(output, str):
            _upload(part, join(parent(output), part.name))
        else:
            _rename(part, output.with_name(part.name), written)


def size_of(place: Place) -> int:
    """Return the bytes of a file with what lies next to it for it, or of all files in a folder."""
    if isinstance(place, str):
        with _store_faults():
            found = info(place)
            below = objects_below(place) if found.is_folder else [found]
            return sum(one.size_bytes for one in below)
    if place.is_file():
        return place.stat().st_size + sum(p.stat().st_size for p in place.parent.glob(f"{place.name}.data"))
    return sum(part.stat().st_size for part in place.rglob("*") if part.is_file())


def _rename(part: Path, place: Path, written: Path) -> None:
    if part.is_file():
        part.chmod(place.parent.stat().st_mode & 0o666)  # some libraries' files are the owner's alone
    try:
        if place.is_dir():
            place.rename(written.with_name(".old"))
        os.replace(part, place)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {place}: {error.strerror or error}") from None


def _upload(part: Path, url: str) -> None:
    """Upload a file, or the files of a folder; objects of a folder that is replaced are removed."""
    files = {url: part}
    if part.is_dir():
        paths = sorted(path for path in part.rglob("*") if path.is_file())
        paths.sort(key=lambda path: path.name == _MARK)  # without it, the folder is no model yet
        files = {join(url, str(path.relative_to(part))): path for path in paths}
    with _store_faults():
        old = [one.url for one in objects_below(url)] if part.is_dir() else []
        for target, path in files.items():
            upload(path, target)
        for target in old:
            if target not in files:
                remove(target)


@contextmanager
def _store_faults() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise EnvironmentFault(error.problem, error.remedy) from None


def place_of(text: str) -> Place:
    """Return a URL without slashes at its end, and the path of anything else.

    Raises:
        ValueError: If the text looks like a URL and is none.
    """
    return check_url(text) if is_url(text) else Path(text)


def place_in(folder: Place, *names: str) -> Place:
    """Return what has these names in a folder."""
    return join(folder, *names) if isinstance(folder, str) else folder.joinpath(*names)
