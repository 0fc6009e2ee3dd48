"""Data frames of pandas and polars, and structured arrays, as arrays: their columns of numbers, by name."""

import math
import numbers
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.unsupported import has_class
from hvdtrain.errors import DataError

_NUMBERS = "biufc"


def is_frame(source: Any) -> bool:
    """Return whether an object is a data frame of pandas or polars, or a structured array."""
    if isinstance(source, np.ndarray):
        return source.dtype.names is not None
    return has_class(source, "pandas.DataFrame") or has_class(source, "polars.DataFrame")


def names_of(frame: Any) -> list[Any]:
    """Return the names of a frame's columns."""
    return list(frame.dtype.names if isinstance(frame, np.ndarray) else frame.columns)


def columns_of(frame: Any) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return a frame's columns of numbers, and the names of those that are left out, such as text.

    Raises:
        DataError: If a column mixes numbers with other values.
    """
    arrays, left_out = {}, []
    for name in names_of(frame):
        array = _column(frame, name)
        if array.dtype.kind in _NUMBERS:
            arrays[str(name)] = array
        else:
            left_out.append(str(name))
    return arrays, left_out


def matrix_of(name: str, frame: Any) -> NDArray[Any]:
    """Return a frame as one array (rows, columns).

    Raises:
        DataError: If it has columns of other than numbers, naming them with their types.
    """
    arrays, left_out = columns_of(frame)
    if left_out:
        raise DataError(
            f"{name!r} is a data frame with columns that are not numbers: {_types(frame, left_out)}",
            "Drop or encode them.",
        )
    if not arrays:
        return np.zeros((len(frame), 0))
    matrix = np.stack(list(arrays.values()), axis=1)
    for column, array in arrays.items():
        if (
            matrix.dtype.kind == "f"
            and array.dtype.kind in "iu"
            and np.abs(array.astype(float)).max(initial=0) > 2**53
        ):
            raise DataError(
                f"the column {column!r} of {name!r} has whole numbers above 2**53, which are rounded "
                "together with columns of fractions",
                "Number its values from 0, such as with pandas.factorize, or give it by itself.",
            )
    return matrix


def _column(frame: Any, name: Any) -> NDArray[Any]:
    column = frame[name]
    if isinstance(column, np.ndarray):
        return column
    if getattr(column, "ndim", 1) > 1:
        raise DataError(f"a data frame has several columns named {name!r}", "Rename them.")
    array = np.asarray(column.to_numpy())
    if array.dtype == object and any(map(_is_number, array)):
        raise DataError(
            f"the column {name!r} of a data frame mixes numbers with other or missing values, type "
            f"{column.dtype}",
            f"Fill in or drop missing values, then convert it: frame[{str(name)!r}].astype('float32').",
        )
    return array


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) and not (isinstance(value, float) and math.isnan(value))


def _types(frame: Any, names: list[str]) -> str:
    types = {str(name): frame[name].dtype for name in names_of(frame)}
    return ", ".join(f"{name} ({types[name]})" for name in names)
