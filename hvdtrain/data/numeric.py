"""What can become an array of numbers, the bits that frameworks are given, and how much arrays differ."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

# differences of this size, relative to the values, are rounding of 64-bit arithmetic
_ROUNDING = 1e-12
# what the rounding to 32 bits may be of a column's standard deviation, if its values are not whole numbers
_HARMLESS = 1e-5

_kept = {"bits": 32}


def is_numeric(value: Any) -> bool:
    """Return whether a value of a record becomes an array of numbers."""
    if isinstance(value, str | bytes | Mapping) or value is None:
        return False
    if isinstance(value, np.ndarray) and value.dtype == object:  # lists of unequal lengths
        return all(map(is_numeric, value))
    try:
        return np.asarray(value).dtype.kind in "biufc"
    except ValueError:
        return False


def float_bits() -> int:
    """Return the bits of the floating-point numbers that this process makes of 64-bit data: 32 or 64."""
    return _kept["bits"]


def set_float_bits(bits: int) -> None:
    """Make 64-bit data of this process floating-point numbers of 32 bits, or keep them, from now on."""
    _kept["bits"] = bits


@contextmanager
def all_bits() -> Iterator[None]:
    """Return a context in which 64-bit data stay as they are."""
    before = float_bits()
    set_float_bits(64)
    try:
        yield
    finally:
        set_float_bits(before)


def narrowed(array: NDArray[Any]) -> NDArray[Any]:
    """Return floating-point numbers of 64 bits or more as 32 bits, and other arrays as they are."""
    is_wide = array.dtype.kind == "f" and array.dtype.itemsize >= 8
    with np.errstate(over="ignore"):
        return array.astype(np.float32) if is_wide else array


def merged_by_cast(array: NDArray[Any]) -> tuple[int, float, float] | None:
    """Return the first column of 64-bit numbers in which different values become equal in 32 bits.

    Values that are not whole numbers may come closer by chance where there are many: they count only if the
    rounding is large for the column.

    Args:
        array: (samples, ...).

    Returns:
        Number of the column, and two of its values, or one of them and infinity; None if there is no such
        column.
    """
    columns = np.sort(array.reshape(len(array), -1), axis=0).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        cast = columns.astype(np.float32)
        gaps = np.diff(columns, axis=0)
        is_merged = (gaps > _ROUNDING * np.abs(columns[1:])) & (cast[1:] == cast[:-1])
        typical, spread = np.abs(np.nanmedian(columns, 0)), np.nanstd(columns, 0)
        is_rough = np.spacing(typical.astype(np.float32)) > _HARMLESS * spread
        counts = is_rough | (columns == np.rint(columns)).all(0)
    overflows = np.isinf(cast) & np.isfinite(columns)
    for column in np.flatnonzero((is_merged.any(0) & counts) | overflows.any(0)):
        if overflows[:, column].any():
            return int(column), float(columns[overflows[:, column], column][0]), float("inf")
        place = int(np.argmax(is_merged[:, column]))
        return int(column), float(columns[place, column]), float(columns[place + 1, column])
    return None


def leaves_of(outputs: Any) -> Iterator[NDArray[Any]]:
    """Yield the arrays of floating-point numbers in a model's outputs."""
    if isinstance(outputs, np.ndarray) and outputs.dtype.kind == "f":
        yield outputs
    elif isinstance(outputs, Mapping | tuple | list):
        for part in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from leaves_of(part)


def distance(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return the norm of a difference relative to that of the first; of values that are finite in both."""
    finite = np.isfinite(one) & np.isfinite(other)
    one, other = one[finite], other[finite]
    size = float(np.linalg.norm(one))
    return float(np.linalg.norm(one - other)) / size if size else float(np.linalg.norm(other) > 0)
