"""Arrays in memory-mapped files: opened on first use, recognised, and opened again by another process."""

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import DataError


class MappedArray:
    """A part of a file as an array, mapped into memory on first use.

    All workers of a host share its pages in memory, and the kernel drops them when memory is short.
    Only its location is pickled, so another process maps the file as well.

    Args:
        path: the file, which holds the whole array.
        offset: where the array begins, in bytes.
        shape: its shape.
        dtype: its number type.
        order: "C" or "F".
    """

    def __init__(
        self, path: Path, offset: int, shape: tuple[int, ...], dtype: Any = np.uint8, order: Any = "C"
    ) -> None:
        self._location = (path, offset, shape, dtype, order)
        self._array: NDArray[Any] | None = None

    def __getstate__(self) -> Any:
        return self._location

    def __setstate__(self, location: Any) -> None:
        self._location = location
        self._array = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._location[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self._location[2]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The number type of the array."""
        dtype: np.dtype[Any] = np.dtype(self._location[3])
        return dtype

    def __len__(self) -> int:
        return self.shape[0]

    def array(self) -> NDArray[Any]:
        """Return the mapped array, read-only.

        Raises:
            DataError: If the file cannot be mapped.
        """
        if self._array is None:
            path, offset, shape, dtype, order = self._location
            try:
                mapped = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)
            except (OSError, ValueError) as error:  # ValueError: the file has become shorter
                raise DataError(f"cannot map {path} into memory: {error}") from None
            self._array = mapped.view(np.ndarray)
        return self._array

    def __getitem__(self, indices: Any) -> NDArray[Any]:
        found: NDArray[Any] = self.array()[indices]
        return found


def memmap_base(array: NDArray[Any]) -> np.memmap[Any, Any] | None:
    """Return the memory-mapped file that an array is a view of, or None if it is in ordinary memory."""
    base: Any = array
    while isinstance(base, np.ndarray) and isinstance(base.base, np.ndarray):
        base = base.base
    return base if isinstance(base, np.memmap) and isinstance(base.base, mmap.mmap) else None


def file_location(array: NDArray[Any]) -> tuple[str, int] | None:
    """Return the file that holds an array and its offset there in bytes, or None if it must be copied.

    An array that was mapped copy-on-write must be copied: it may differ from its file.
    """
    base = memmap_base(array)
    if base is None or base.filename is None or base.mode == "c":
        return None
    distance = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return str(Path(os.fsdecode(base.filename)).resolve()), base.offset + distance


def map_location(
    path: str, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[Any]:
    """Return an array that a file holds, mapped read-only."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.ndarray(shape, dtype, mapping, offset, strides)
