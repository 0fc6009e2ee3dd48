"""Files of images and labels: arrays mapped into memory, and errors that name the file.

Nothing is allocated by what a header declares before the size of the file bears it out.
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import DataError

DEFLATE_LIMIT = 1032  # a deflated byte holds at most so many (zlib's documentation)
_CHUNK_BYTES = 1 << 20
_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, BadZipFile)


@contextmanager
def reading(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Context in which a file is read.

    Args:
        path: the file.
        more: further errors that what reads it raises for damaged files.

    Raises:
        DataError: naming the file, in place of what the system or a decompressor raises.
    """
    try:
        yield
    except _ERRORS + more as error:
        said = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DataError(f"{path} cannot be read: {said}") from None


class MappedArray:
    """A stretch of a file as an array, mapped into memory on first use.

    All workers of a host share its pages, and the system drops those that it needs for others.
    Pickled it is its place in the file, so that another process maps it as well.

    Args:
        path: the file, which holds all of it.
        offset: where it begins, in bytes.
        shape: its shape.
        dtype: its number type.
        order: "C" or "F".
    """

    def __init__(
        self, path: Path, offset: int, shape: tuple[int, ...], dtype: Any = np.uint8, order: Any = "C"
    ) -> None:
        self._place = (path, offset, shape, dtype, order)
        self._array: NDArray[Any] | None = None

    def __getstate__(self) -> Any:
        return self._place

    def __setstate__(self, place: Any) -> None:
        self._place = place
        self._array = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._place[2]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its number type."""
        dtype: np.dtype[Any] = np.dtype(self._place[3])
        return dtype

    def __len__(self) -> int:
        return self.shape[0]

    def array(self) -> NDArray[Any]:
        """Give the mapped array."""
        if self._array is None:
            path, offset, shape, dtype, order = self._place
            with reading(path):
                mapped = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)
            self._array = mapped.view(np.ndarray)
        return self._array

    def __getitem__(self, indices: Any) -> NDArray[Any]:
        found: NDArray[Any] = self.array()[indices]
        return found


def read_exactly(stream: IO[bytes], count: int, path: Path, what: str) -> bytearray:
    """Read as many bytes as a header declared; memory grows with what is there.

    Args:
        stream: where from.
        count: how many bytes.
        path: the file, for messages.
        what: what they are, such as "60,000 images of 28x28".

    Raises:
        DataError: where it ends before.
    """
    data = bytearray()
    while len(data) < count:
        chunk = stream.read(min(_CHUNK_BYTES, count - len(data)))
        if not chunk:
            raise DataError(
                f"{path} is truncated: {what} need {count:,} bytes, and it ends after {len(data):,} of them"
            )
        data += chunk
    return data


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Context with a file, unpacked where its name ends with .gz; errors name it."""
    with reading(path), path.open("rb") as file:
        yield cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file


def plain_size(path: Path) -> int:
    """Give the number of bytes that a file holds, or for a gzipped one the most that it can."""
    with reading(path):
        size = path.stat().st_size
    return size * DEFLATE_LIMIT if path.suffix == ".gz" else size
