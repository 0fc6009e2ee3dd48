"""Finding images: by the given form, or by the names of the files."""

from collections.abc import Callable
from pathlib import Path

from hvdtrain.data.images import cifar, folder, idx, npz
from hvdtrain.data.images.sources import Found, reading
from hvdtrain.errors import DataError

FORMS = ("auto", "idx", "folder", "cifar", "npz")
_WANTED = (
    "Expected: IDX files (train-images-idx3-ubyte, ...), CIFAR-10 batches (data_batch_1.bin, ...), "
    "an npz file, or a sub-folder of images for each class."
)


def find(path: Path, form: str) -> Found:
    """Open the images in a folder or file.

    Args:
        path: a folder, or an npz file.
        form: one of ``FORMS``.

    Raises:
        DataError: If there are no images, or they cannot be used.
    """
    with reading(path):
        if not path.exists():
            raise DataError(f"{path} does not exist (looked in {Path.cwd()})", "Correct task_options.path.")
        if not path.is_dir() and (form not in ("auto", "npz") or path.suffix != ".npz"):
            raise DataError(f"{path} is neither a folder nor an npz file", _WANTED)
        if form == "auto":
            form = _form_of(path)
        if form == "npz":
            return npz.find(path if path.is_file() else _npz_in(path))
        finders: dict[str, Callable[[Path], Found]] = {
            "idx": idx.find,
            "cifar": cifar.find,
            "folder": folder.find,
        }
        return finders[form](path)


def _form_of(path: Path) -> str:
    """Return the form of the files at a path."""
    if path.is_file():
        return "npz"
    if idx.names_in(path):
        return "idx"
    if cifar.folder_of(path):
        return "cifar"
    if any(path.glob("*.npz")):
        return "npz"
    if folder.is_image_folder(path):
        return "folder"
    raise DataError(f"{path} contains no images of a known form", _WANTED)


def _npz_in(path: Path) -> Path:
    found = sorted(path.glob("*.npz"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found[:5]) or "none"
        raise DataError(
            f"{path} must hold one npz file, found {names}", "Give the file as task_options.path."
        )
    return found[0]
