"""A summary of the items that were read, by which workers that read everything compare what they read."""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from hvdtrain.data.unsupported import type_name

_MOST = 64  # bytes or numbers of a value that are looked at, evenly over it
_MOST_PARTS = 16  # of a list
_TOLERANCE = 1e-5  # relative; hosts round floating-point numbers differently

# checksum of text, bytes and integers; a weighted sum of the other numbers, and that of their sizes
Summary = tuple[int, float, float]


class Trace:
    """What was read so far: other items, or the same in another order, have another summary."""

    def __init__(self) -> None:
        self._checksum, self._sum, self._size, self._values = 0, 0.0, 0.0, 0

    @property
    def summary(self) -> Summary:
        """What is to be compared."""
        return self._checksum, self._sum, self._size

    def add(self, item: Any) -> None:
        """Take an item of the source, not decoded; of a large one, parts that are spread over it."""
        if isinstance(item, dict):
            for name, value in item.items():
                self._take(str(name).encode())
                self.add(value)
        elif isinstance(item, list | tuple):
            self._take(b"%d" % len(item))
            for value in item[:: len(item) // _MOST_PARTS + 1]:
                self.add(value)
        elif isinstance(item, str | bytes | bytearray):
            data = item.encode(errors="replace") if isinstance(item, str) else bytes(item)
            self._take(b"%d" % len(data))
            self._take(data[:: len(data) // _MOST + 1])
        elif isinstance(item, bool | int | None):
            self._take(str(item).encode())
        elif isinstance(item, float | np.ndarray | np.generic) or type_name(item).startswith("torch."):
            self._add_array(item)
        else:  # of another package, such as an image that is decoded when it is looked at
            self._take(type_name(item).encode())

    def _add_array(self, item: Any) -> None:
        try:
            array = np.asarray(item)
        except Exception:  # on a device, or with a gradient
            return
        self._take(str(array.shape).encode())
        values = array.reshape(-1)[:: array.size // _MOST + 1]
        if array.dtype.kind in "biuSU":
            self._take(values.tobytes())
        elif array.dtype.kind == "f":
            values = values.astype(np.float64)
            values = values[np.isfinite(values)]
            self._values += 1
            weight = 1 + self._values * 0.6180339887 % 1
            self._sum += weight * float(values.sum())
            self._size += weight * float(np.abs(values).sum())

    def _take(self, data: bytes) -> None:
        self._checksum = crc32(data, self._checksum)


def are_alike(summaries: Sequence[Summary]) -> bool:
    """Return whether workers read the same items in one order, but for rounding."""
    first = summaries[0]
    return all(
        one[0] == first[0] and abs(one[1] - first[1]) <= _TOLERANCE * max(one[2], first[2])
        for one in summaries
    )
