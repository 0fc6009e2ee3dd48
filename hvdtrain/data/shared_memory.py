"""Arrays in shared memory without a name: nothing is left when the last process that maps one ends."""

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray


def copy_to_shared_memory(array: NDArray[Any]) -> int:
    """Copy an array to memory that other processes can map.

    Returns:
        A file descriptor, which those processes must inherit.

    Raises:
        OSError: If there is not enough memory.
    """
    number = os.memfd_create("hvdtrain", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(number, 0, array.nbytes)  # without it, a lack of memory is a SIGBUS
        with mmap.mmap(number, array.nbytes) as mapping:
            np.copyto(np.ndarray(array.shape, array.dtype, mapping), array)
    except BaseException:
        os.close(number)
        raise
    return number


def map_shared_memory(number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array that ``copy_to_shared_memory`` copied.

    It can be written to, but other processes do not see the changes.
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.ndarray(shape, dtype, mmap.mmap(number, size, access=mmap.ACCESS_COPY))
