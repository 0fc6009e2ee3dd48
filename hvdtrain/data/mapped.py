"""Arrays that lie in a file or in shared memory: told from others, and opened by another process."""

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def mapped_root(array: NDArray[Any]) -> np.memmap[Any, Any] | None:
    """Give the memory-mapped file that an array is a view of; None where it lies in memory."""
    root: Any = array
    while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray):
        root = root.base
    return root if isinstance(root, np.memmap) and isinstance(root.base, mmap.mmap) else None


def place_in_file(array: NDArray[Any]) -> tuple[str, int] | None:
    """Give the file that an array lies in and where in it; None where it must be copied.

    An array that was mapped copy-on-write may differ from its file.
    """
    root = mapped_root(array)
    if root is None or root.filename is None or root.mode == "c":
        return None
    distance = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return str(Path(root.filename).resolve()), root.offset + distance


def open_in_file(
    path: str, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[Any]:
    """Map an array that lies in a file, read-only."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.ndarray(shape, dtype, mapping, offset, strides)


def share(array: NDArray[Any]) -> int:
    """Copy an array to memory that other processes can map; it is gone with the last of them.

    Returns:
        A file descriptor.

    Raises:
        OSError: where there is no memory for it.
    """
    number = os.memfd_create("hvdtrain", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(number, 0, array.nbytes)  # else a lack of memory is a SIGBUS
        with mmap.mmap(number, array.nbytes) as mapping:
            np.copyto(np.ndarray(array.shape, array.dtype, mapping), array)
    except BaseException:
        os.close(number)
        raise
    return number


def open_shared(number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Map an array that ``share`` gave; what this process changes in it, the others do not see."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.ndarray(shape, dtype, mmap.mmap(number, size, access=mmap.ACCESS_COPY))
