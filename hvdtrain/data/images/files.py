"""Reading files of images and labels, with errors that name the file.

No memory is allocated for what a header declares unless the size of the file agrees with it.
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast
from zipfile import BadZipFile

from hvdtrain.errors import DataError
from hvdtrain.storage.files import open_regular, regular_size

DEFLATE_LIMIT = 1032  # largest compression ratio of deflate (zlib's documentation)
_CHUNK_BYTES = 1 << 20
_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, BadZipFile)


@contextmanager
def reading(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Return a context in which a file is read and errors name it.

    Args:
        path: the file.
        more: further exceptions that are raised for damaged files.

    Raises:
        DataError: If the system or a decompressor raises an exception.
    """
    try:
        yield
    except _ERRORS + more as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DataError(f"{path} cannot be read: {reason}") from None


def read_exactly(stream: IO[bytes], count: int, path: Path, what: str) -> bytearray:
    """Return as many bytes as a header declares; memory grows only with the bytes that are read.

    Args:
        stream: the stream to read.
        count: number of bytes.
        path: the file, for messages.
        what: what the bytes are, such as "60,000 images of 28x28".

    Raises:
        DataError: If the stream ends before.
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
    """Return a context with a file, decompressed if its name ends with .gz; errors name it."""
    with reading(path), open_regular(path) as file:
        yield cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file


def plain_size(path: Path) -> int:
    """Return the size of a file in bytes; of a gzipped file, the most that it can decompress to."""
    with reading(path):
        size = regular_size(path)
    return size * DEFLATE_LIMIT if path.suffix == ".gz" else size
