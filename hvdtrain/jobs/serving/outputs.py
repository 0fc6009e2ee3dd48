"""What commands write in addition to runs: whole or not there, and over nothing else."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.storage.files import check_url
from hvdtrain.storage.urls import is_url

PathOrUrl = Path | str  # the text is a URL
_MOST_NAME_BYTES = 200  # of a file's name, in addition to which there are others with longer ones
_MARK = "saved_model.pb"  # of a folder that TensorFlow wrote


def holds_saved_model(place: Path) -> bool:
    """Return whether a folder is what TensorFlow wrote."""
    return (place / _MARK).exists()


def check_not_there(output: Path, force: bool, may_be_folder: bool = False) -> None:
    """Check that nothing is lost when a file is written."""
    if not output.exists():
        return
    if not force:
        raise UsageError(f"{output} exists", "Give another --output, or --force to replace it.")
    if output.is_dir() and not may_be_folder:
        raise UsageError(f"{output} is a directory, and no export: --force does not replace it")


@contextmanager
def written_beside(output: Path) -> Iterator[Path]:
    """Return a context with a path of the same name in a folder next to; the folder is removed at its end."""
    if len(os.fsencode(output.name)) > _MOST_NAME_BYTES:
        raise UsageError(
            f"{output}: its last part is longer than {_MOST_NAME_BYTES} bytes", "Give a shorter name."
        )
    folder = output.with_name(f".new-{output.name}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)  # what a killed export left
        folder.mkdir()
    except OSError as error:
        raise EnvironmentFault(f"cannot write {output}: {error.strerror or error}") from None
    try:
        yield folder / output.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_into_place(written: Path, output: Path) -> None:
    """Rename what was written, and what lies next to it for it; what was there is removed."""
    # the file itself last: it needs the others
    for part in sorted(written.parent.iterdir(), key=lambda part: part == written):
        place = output.with_name(part.name)
        if part.is_file():
            part.chmod(place.parent.stat().st_mode & 0o666)  # some libraries' files are the owner's alone
        try:
            if place.is_dir():
                place.rename(written.with_name(".old"))
            os.replace(part, place)
        except OSError as error:
            raise EnvironmentFault(f"cannot write {place}: {error.strerror or error}") from None


def size_of(place: Path) -> int:
    """Return the bytes of a file with what lies next to it for it, or of all files in a folder."""
    if place.is_file():
        return place.stat().st_size + sum(p.stat().st_size for p in place.parent.glob(f"{place.name}.data"))
    return sum(part.stat().st_size for part in place.rglob("*") if part.is_file())


def place_of(text: str) -> PathOrUrl:
    """Return a URL without slashes at its end, and the path of anything else."""
    return check_url(text) if is_url(text) else Path(text)
