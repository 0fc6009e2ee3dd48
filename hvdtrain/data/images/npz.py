"""npz files with images and labels, as numpy writes them. Nothing is unpickled."""

import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from hvdtrain.data.images.sources import ArraySource, Found, check_counts, check_shape, reading
from hvdtrain.errors import DataError
from hvdtrain.storage.files import open_regular

# names of images and labels, for training and for evaluation
_TRAIN = (("x_train", "y_train"), ("images", "labels"), ("train_images", "train_labels"))
_EVAL = (("x_test", "y_test"), ("test_images", "test_labels"))
# exceptions that zipfile raises for damaged archives, in addition to its own
_ZIP_ERRORS = (struct.error, ValueError, OverflowError, RuntimeError)


def find(path: Path) -> Found:
    """Open an npz file, whose arrays are read into memory."""
    with reading(path, *_ZIP_ERRORS), open_regular(path) as file, NpzFile(file, own_fid=False) as archive:
        train = _first_pair(archive, _TRAIN)
        if train is None:
            raise DataError(
                f"{path} contains no arrays x_train and y_train, or images and labels; "
                f"it has {', '.join(sorted(archive.files)[:20]) or 'none'}"
            )
        evaluation = _first_pair(archive, _EVAL)
        return Found(
            "npz file",
            _read_pair(path, archive, train),
            _read_pair(path, archive, evaluation) if evaluation else None,
        )


def _first_pair(archive: Any, pairs: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    return next((pair for pair in pairs if all(name in archive.files for name in pair)), None)


def _read_pair(path: Path, archive: Any, names: tuple[str, str]) -> ArraySource:
    images, labels = (_read_array(path, archive, name) for name in names)
    if images.dtype != np.uint8:
        raise DataError(
            f"{path}, {names[0]}: images must be uint8 (0 to 255), found {images.dtype}",
            "Convert them before saving, for example (images * 255).astype(numpy.uint8).",
        )
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}, {names[1]}: labels must be whole numbers, found {labels.dtype}")
    check_shape(path, names[0], images.shape)
    values = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if values.ndim != 1:
        raise DataError(f"{path}, {names[1]}: labels must have shape (images,), found {labels.shape}")
    check_counts(path / names[0], path / names[1], (images.shape[0], len(values)))
    return ArraySource(images, values.astype(np.int64), partial(_where, path, names[1]))


def _read_array(path: Path, archive: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(archive[name])
    # for damaged headers numpy raises many types of exceptions, those of Python's parser among them
    except Exception as error:
        message = str(error).partition("\n")[0][:200] or type(error).__name__
        raise DataError(f"{path}, {name}: cannot be read as an array: {message}") from None


def _where(path: Path, name: str, index: int) -> str:
    return f"{path}, {name}[{index}]"
