"""Arrays in a temporary file in place of memory, for a state that is larger than what one worker keeps."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ALIGNED_BYTES = 64


class Spool:
    """Makes arrays that lie in one temporary file, whose name is removed at once.

    The file takes room on the disk until the last of its arrays is gone, also if the process is killed.

    Args:
        folder: where the file lies; the arrays are in memory if None. It is made if it is missing.

    Raises:
        OSError: If the file cannot be made.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None
        self._size = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".spool-")  # noqa: SIM115 - lives as long as this

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array whose values are undefined.

        Raises:
            OSError: If the disk has no room for it: that is reserved here, since writing to an array cannot
                report it.
        """
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if self._file is None or not size:
            return np.empty(shape, kind)
        begin = self._size
        os.posix_fallocate(self._file.fileno(), begin, size)
        self._size = -(-(begin + size) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return np.memmap(self._file, kind, "r+", begin, shape)

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of an array.

        Raises:
            OSError: If the disk has no room for it.
        """
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy
