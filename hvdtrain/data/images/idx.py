"""IDX files, such as those of MNIST and Fashion-MNIST, plain or gzipped.

Format: http://yann.lecun.com/exdb/mnist/ - two zero bytes, the number type, the number of axes,
each axis as 4 bytes in big-endian order; then the numbers.
"""

import math
import re
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.images.sources import (
    ArraySource,
    Found,
    check_counts,
    check_shape,
    opened,
)
from hvdtrain.data.serialization import MappedArray
from hvdtrain.errors import DataError

_NAME = re.compile(r"(.*[-_.])?(train|t10k|test)[-_.](images|labels)[-_.]idx\d[-_.]ubyte(\.gz)?")
_UNSIGNED_BYTE = 0x08
_MOST_AXES = 4


def names_in(folder: Path) -> list[Path]:
    """Return the files of a folder that have the name of an IDX file."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def find(folder: Path) -> Found:
    """Open the IDX files of a folder."""
    train = _open_part(folder, ("train",))
    if train is None:
        raise DataError(f"{folder} contains no training images: train-images-idx3-ubyte or the same with .gz")
    return Found("IDX files", train, _open_part(folder, ("t10k", "test")))


def _open_part(folder: Path, parts: tuple[str, ...]) -> ArraySource | None:
    images, labels = (_the_one(folder, parts, what) for what in ("images", "labels"))
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        missing = "labels" if labels is None else "images"
        raise DataError(f"there is no file of {missing} beside {images or labels}")
    pixels, values = read_idx(images, "images"), read_idx(labels, "labels")
    check_shape(images, "byte 4", pixels.shape)
    check_counts(images, labels, (pixels.shape[0], values.shape[0]))
    where = partial(_where, labels)
    return ArraySource(pixels, np.asarray(values[:]).astype(np.int64), where)


def _the_one(folder: Path, parts: tuple[str, ...], what: str) -> Path | None:
    """Find a file; of a plain and a gzipped one of the same name the plain one."""
    found = {}
    for path in reversed(names_in(folder)):
        match = _NAME.fullmatch(path.name)
        if match and match[2] in parts and match[3] == what:
            found[path.name.removesuffix(".gz")] = path
    if len(found) > 1:
        names = ", ".join(sorted(path.name for path in found.values()))
        raise DataError(f"{folder} contains more than one file of {what}: {names}", "Keep only one of them.")
    return next(iter(found.values()), None)


def read_idx(path: Path, what: str) -> MappedArray | NDArray[np.uint8]:
    """Read a file of unsigned bytes: mapped into memory, or decompressed if it is gzipped.

    Args:
        path: the file.
        what: "images" or "labels".

    Raises:
        DataError: If its header or its size is wrong.
    """
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
    return MappedArray(path, offset, shape) if count else np.empty(shape, np.uint8)


def _shape(header: bytes, path: Path, what: str) -> tuple[int, ...]:
    """Return the shape that a header declares."""
    axes = (1,) if what == "labels" else (3, 4)
    if len(header) < 4:
        raise DataError(f"{path} is truncated: it ends at byte {len(header)}, within the magic number")
    magic = int.from_bytes(header[:4])
    expected = [_UNSIGNED_BYTE << 8 | count for count in axes]
    if magic not in expected:
        raise DataError(
            f"{path}, byte 0: the magic number of {what} of unsigned bytes is "
            f"{' or '.join(f'0x{number:08x}' for number in expected)}, found 0x{magic:08x}"
        )
    end = 4 + 4 * header[3]
    if len(header) < end:
        raise DataError(f"{path} is truncated: it ends at byte {len(header)}, within its header")
    return tuple(int.from_bytes(header[place : place + 4]) for place in range(4, end, 4))


def _where(labels: Path, index: int) -> str:
    return f"{labels}, byte {8 + index} (sample {index})"
