"""What users' data become: arrays by flat names, and what is said of those that cannot."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.collate import ragged_error
from hvdtrain.data.frames import is_frame, matrix_of
from hvdtrain.data.nesting import flatten
from hvdtrain.data.numeric import float_bits, narrowed
from hvdtrain.data.unsupported import check_dense, check_unmasked
from hvdtrain.errors import DataError


def renamed(item: Mapping[Any, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a mapping with hvdtrain's names, flat.

    Raises:
        DataError: If two of its keys would have the same name, or one that is to be renamed is missing.
    """
    if not names:
        return flatten(item)
    result = {names.get(str(key), str(key)): value for key, value in item.items()}
    if len(result) < len(item):
        raise DataError(
            f"two keys of {[str(key) for key in item]} would have the same name; {dict(names)} are renamed",
            "Remove or rename one of them.",
        )
    keys = {str(key) for key in item}
    missing = next((key for key in names if key not in keys), None)
    if missing is not None:
        raise DataError(
            f"the data has no column {missing!r}; it has {sorted(keys)}",
            "Name its columns: hvdtrain.as_dataset(data, inputs='image', targets='label').",
        )
    return flatten(result)


def named(item: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a sample, or a batch that collate made, as a mapping of flat names to values.

    Raises:
        DataError: If it is a tuple of other than inputs and targets.
    """
    if isinstance(item, Mapping):
        return renamed(item, names)
    if isinstance(item, (tuple, list)):
        if len(item) != 2:
            raise DataError(
                f"a sample that is a {type(item).__name__} must hold (inputs, targets); "
                f"found {len(item)} parts",
                "Return a dict with the keys 'inputs' and 'targets' instead.",
            )
        return flatten({"inputs": item[0], "targets": item[1]})
    return flatten({"inputs": item})


def left_out_notes(columns: Sequence[str]) -> tuple[str, ...]:
    """Return what to tell a user of columns that are left out."""
    if not columns:
        return ()
    several = len(columns) > 1
    return (
        f"the column{'s' * several} {', '.join(columns)} {'are' if several else 'is'} left out: not numbers",
    )


def check_kept(left_out: Sequence[str], names: Mapping[str, str]) -> None:
    """Check that no column that was named is left out.

    Raises:
        DataError: If one is.
    """
    lost = next((key for key in names if key in left_out), None)
    if lost is not None:
        raise DataError(
            f"the column {lost!r}, which becomes {names[lost]!r}, does not hold numbers",
            "Encode it, such as class names as 0, 1, 2, ...",
        )


def as_array(name: str, value: Any) -> NDArray[Any]:
    """Return what a user gave for a name as an array.

    Raises:
        DataError: If it is sparse or ragged, or a data frame with columns that are not numbers.
    """
    check_dense(name, value)
    check_unmasked(name, value)
    if is_frame(value):
        return matrix_of(name, value)
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of lists of unequal lengths
        raise ragged_error(name, value, range(len(value))) from error


def native(array: Any) -> NDArray[Any]:
    """Return an array in the machine's byte order, and of at most 64 bits."""
    result = np.asarray(array)
    if result.dtype.kind == "f" and result.dtype.itemsize > 8:
        return result.astype(np.float64)
    return result if result.dtype.isnative else result.astype(result.dtype.newbyteorder("="))


def canonical(array: Any) -> NDArray[Any]:
    """Return an array in a type that both frameworks can use.

    64-bit floats are converted to 32 bits, unless the model has 64 (``set_float_bits``).
    """
    return native(array) if float_bits() == 64 else narrowed(native(array))


def arrays_of(sample: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return a sample's values as arrays that both frameworks can use.

    Raises:
        DataError: If a value is masked.
    """
    for name, value in sample.items():
        check_unmasked(name, value)
    return {name: canonical(value) for name, value in sample.items()}
