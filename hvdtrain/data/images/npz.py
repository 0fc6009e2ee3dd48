"""npz files of numpy arrays: mapped into memory, or decompressed if they are compressed.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html - a zip archive of
.npy files. Nothing is unpickled.
"""

import math
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from hvdtrain.data.images.sources import (
    DEFLATE_LIMIT,
    ArraySource,
    Found,
    check_counts,
    check_shape,
    read_exactly,
    reading,
)
from hvdtrain.data.serialization import MappedArray
from hvdtrain.errors import DataError
from hvdtrain.storage.files import open_regular

# names of images and labels, for training and for evaluation
_TRAIN = (("x_train", "y_train"), ("images", "labels"), ("train_images", "train_labels"))
_EVAL = (("x_test", "y_test"), ("test_images", "test_labels"))
# exceptions that zipfile raises for damaged archives, besides its own
_ZIP_ERRORS = (struct.error, ValueError, OverflowError, RuntimeError)
_LOCAL_HEADER_BYTES = 30
_LONGEST_HEADER = 10_000  # characters of a .npy header, as numpy.load's limit


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    offset: int  # of the numbers within the member, in bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def find(path: Path) -> Found:
    """Open an npz file."""
    with reading(path, *_ZIP_ERRORS), open_regular(path) as file, ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        train = _first_pair(members, _TRAIN)
        if train is None:
            raise DataError(
                f"{path} contains no arrays x_train and y_train, or images and labels; "
                f"it has {', '.join(sorted(members)[:20]) or 'none'}"
            )
        evaluation = _first_pair(members, _EVAL)
        return Found(
            "npz file",
            _open_pair(path, archive, members, train),
            _open_pair(path, archive, members, evaluation) if evaluation else None,
        )


def _first_pair(members: dict[str, ZipInfo], pairs: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    return next((pair for pair in pairs if all(name in members for name in pair)), None)


def _open_pair(
    path: Path, archive: ZipFile, members: dict[str, ZipInfo], names: tuple[str, str]
) -> ArraySource:
    images, labels = (_open_array(path, archive, members[name], name) for name in names)
    if images.dtype != np.uint8:
        raise DataError(
            f"{path}, {names[0]}: images must be uint8 (0 to 255), found {images.dtype}",
            "Convert them before saving, for example (images * 255).astype(numpy.uint8).",
        )
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}, {names[1]}: labels must be whole numbers, found {labels.dtype}")
    check_shape(path, names[0], images.shape)
    values = np.asarray(labels[:])
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise DataError(f"{path}, {names[1]}: labels must have shape (images,), found {labels.shape}")
    check_counts(path / names[0], path / names[1], (images.shape[0], len(values)))
    return ArraySource(images, values.astype(np.int64), partial(_where, path, names[1]))


def _open_array(path: Path, archive: ZipFile, info: ZipInfo, name: str) -> Any:
    """Open a member: mapped if it is stored without compression, otherwise read."""
    if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED) or info.flag_bits & 1:
        raise DataError(f"{path}, {name}: compressed or encrypted in a way that numpy does not write")
    with archive.open(info) as stream:
        header = _read_header(stream, path, name)
        declared = header.offset + header.nbytes
        limit = info.compress_size * (1 if info.compress_type == ZIP_STORED else DEFLATE_LIMIT)
        if declared != info.file_size or declared > limit:
            raise DataError(
                f"{path}, {name}: the header declares shape {header.shape} of {header.dtype} = "
                f"{header.nbytes:,} bytes from byte {header.offset}, and there are "
                f"{min(info.file_size, limit) - header.offset:,}"
            )
        if info.compress_type == ZIP_STORED and header.nbytes:
            return _map(path, info, name, header)
        data = read_exactly(stream, header.nbytes, path, name)
        stream.read(1)  # zipfile compares the checksum at the end
    order: Any = "F" if header.fortran else "C"
    array: NDArray[Any] = np.frombuffer(data, header.dtype).reshape(header.shape, order=order)
    return array


def _read_header(stream: IO[bytes], path: Path, name: str) -> _Header:
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(stream, max_header_size=_LONGEST_HEADER)
    # for damaged headers numpy raises many types of exceptions, those of Python's parser among them
    except Exception as error:
        message = str(error).partition("\n")[0]
        raise DataError(f"{path}, {name}: the .npy header cannot be read: {message}") from None
    if dtype.hasobject or dtype.kind not in "biuf":
        raise DataError(f"{path}, {name}: holds {dtype}; it must be numbers (objects are never unpickled)")
    if any(side < 0 for side in shape):
        raise DataError(f"{path}, {name}: the header declares shape {shape}")
    return _Header(tuple(shape), fortran, dtype, stream.tell())


def _map(path: Path, info: ZipInfo, name: str, header: _Header) -> MappedArray:
    """Return a stored member as a mapped array; its bytes follow a local header of variable length."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        local = file.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack("<26xHH", local)
    offset = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes + header.offset
    if offset + header.nbytes > path.stat().st_size:
        raise DataError(f"{path}, {name} is truncated: it ends beyond the end of the file")
    return MappedArray(path, offset, header.shape, header.dtype, "F" if header.fortran else "C")


def _where(path: Path, name: str, index: int) -> str:
    return f"{path}, {name}[{index}]"
