"""Images in arrays: IDX files such as those of MNIST, and npz files.

IDX (http://yann.lecun.com/exdb/mnist/), plain or gzipped: two zero bytes, the number type, the number of
axes, each axis as 4 bytes in big-endian order; then the numbers. Nothing in an npz file is unpickled.
"""

import math
import re
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from hvdtrain.data.images.sources import ArraySource, Found, check_counts, check_shape, opened, reading
from hvdtrain.data.serialization import mapped
from hvdtrain.errors import DataError
from hvdtrain.storage.files import open_regular

_IDX_NAME = re.compile(r"(.*[-_.])?(train|t10k|test)[-_.](images|labels)[-_.]idx\d[-_.]ubyte(\.gz)?")
_UNSIGNED_BYTE = 0x08
_MOST_AXES = 4


def idx_names_in(folder: Path) -> list[Path]:
    """Return the files of a folder that have the name of an IDX file."""
    return sorted(path for path in folder.iterdir() if _IDX_NAME.fullmatch(path.name))


def find_idx(folder: Path) -> Found:
    """Open the IDX files of a folder."""
    train = _open_idx(folder, ("train",))
    if train is None:
        raise DataError(f"{folder} contains no training images: train-images-idx3-ubyte or the same with .gz")
    return Found("IDX files", train, _open_idx(folder, ("t10k", "test")))


def _open_idx(folder: Path, parts: tuple[str, ...]) -> ArraySource | None:
    images, labels = (_the_one(folder, parts, what) for what in ("images", "labels"))
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        missing = "labels" if labels is None else "images"
        raise DataError(f"there is no file of {missing} next to {images or labels}")
    pixels, values = read_idx(images, "images"), read_idx(labels, "labels")
    check_shape(images, "byte 4", pixels.shape)
    check_counts(images, labels, (pixels.shape[0], values.shape[0]))
    return ArraySource(pixels, values.astype(np.int64), partial(_place, labels, 8))


def _the_one(folder: Path, parts: tuple[str, ...], what: str) -> Path | None:
    """Find a file; of a plain and a gzipped one of the same name the plain one."""
    found = {}
    for path in reversed(idx_names_in(folder)):
        match = _IDX_NAME.fullmatch(path.name)
        if match and match[2] in parts and match[3] == what:
            found[path.name.removesuffix(".gz")] = path
    if len(found) > 1:
        names = ", ".join(sorted(path.name for path in found.values()))
        raise DataError(f"{folder} contains more than one file of {what}: {names}", "Keep only one of them.")
    return next(iter(found.values()), None)


def read_idx(path: Path, what: str) -> NDArray[np.uint8]:
    """Read a file of unsigned bytes: mapped into memory, or decompressed if it is gzipped."""
    with opened(path) as stream:
        shape = _shape(stream.read(4 + 4 * _MOST_AXES), path, what)
        count, offset = math.prod(shape), 4 + 4 * len(shape)
        stream.seek(offset)
        data = stream.read() if path.suffix == ".gz" else None
    more = (path.stat().st_size - offset if data is None else len(data)) - count
    if more:
        raise DataError(
            f"{path} {'is truncated' if more < 0 else 'does not fit its header'}: the header declares "
            f"{' x '.join(f'{side:,}' for side in shape)} = {count:,} bytes from byte {offset}, and "
            f"there are {abs(more):,} bytes {'more' if more > 0 else 'less'}"
        )
    if data is not None:
        return np.frombuffer(data, np.uint8).reshape(shape)
    return mapped(path, offset, shape) if count else np.empty(shape, np.uint8)


def _shape(header: bytes, path: Path, what: str) -> tuple[int, ...]:
    """Return the shape that a header declares."""
    expected = [_UNSIGNED_BYTE << 8 | count for count in ((1,) if what == "labels" else (3, 4))]
    magic = int.from_bytes(header[:4])
    if len(header) > 3 and magic not in expected:
        raise DataError(
            f"{path}, byte 0: the magic number of {what} of unsigned bytes is "
            f"{' or '.join(f'0x{number:08x}' for number in expected)}, found 0x{magic:08x}"
        )
    end = 4 + 4 * header[3] if len(header) > 3 else 4
    if len(header) < end:
        raise DataError(f"{path} is truncated: it ends at byte {len(header)}, within its header")
    return tuple(int.from_bytes(header[place : place + 4]) for place in range(4, end, 4))


# names of images and labels, for training and for evaluation
_TRAIN_ARRAYS = (("x_train", "y_train"), ("images", "labels"), ("train_images", "train_labels"))
_EVAL_ARRAYS = (("x_test", "y_test"), ("test_images", "test_labels"))
# exceptions that zipfile raises for damaged archives, in addition to its own
_ZIP_ERRORS = (struct.error, ValueError, OverflowError, RuntimeError)


def find_npz(path: Path) -> Found:
    """Open an npz file, whose arrays are read into memory."""
    with reading(path, *_ZIP_ERRORS), open_regular(path) as file, NpzFile(file, own_fid=False) as archive:
        train = _first_pair(archive, _TRAIN_ARRAYS)
        if train is None:
            raise DataError(
                f"{path} contains no arrays x_train and y_train, or images and labels; "
                f"it has {', '.join(sorted(archive.files)[:20]) or 'none'}"
            )
        evaluation = _first_pair(archive, _EVAL_ARRAYS)
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
    return ArraySource(images, values.astype(np.int64), partial(_place, path, names[1]))


def _read_array(path: Path, archive: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(archive[name])
    # for damaged headers numpy raises many types of exceptions, those of Python's parser among them
    except Exception as error:
        message = str(error).partition("\n")[0][:200] or type(error).__name__
        raise DataError(f"{path}, {name}: cannot be read as an array: {message}") from None


def _place(path: Path, first: int | str, index: int) -> str:
    """Return where a label lies: of bytes from the first one, or of an array by its name."""
    if isinstance(first, int):
        return f"{path}, byte {first + index} (sample {index})"
    return f"{path}, {first}[{index}]"
