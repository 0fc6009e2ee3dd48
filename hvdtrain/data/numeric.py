"""What can become an array of numbers, the bits that frameworks are given, and how much arrays differ."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import DataError

SEPARATOR = "/"
# keys that a loss compares with; the first that a batch has becomes its "targets"
TARGETS = ("targets", "labels", "label")

Nest = Callable[[Mapping[str, Any]], dict[str, Any]]


def flatten(item: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a sample or a batch with flat names.

    A value that is a mapping, or a tuple with an array in it, gives one name for each of its parts. A
    tuple of numbers and a list are arrays.
    """
    result: dict[str, Any] = {}
    for key, value in item.items():
        parts = {str(key): value} if not is_nested(value) else _parts(str(key), value)
        for name, part in parts.items():
            if name in result:
                raise DataError(f"two parts of a sample have the same name {name!r}", "Rename one of them.")
            result[name] = part
    return result


def is_nested(value: Any) -> bool:
    """Return whether a value of a sample or a batch has several parts."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, tuple) and any(isinstance(p, Mapping) or has_axes(p) for p in value)


def has_axes(value: Any) -> bool:
    """Return whether a value is an array or a tensor with at least one axis."""
    return hasattr(value, "shape") and np.ndim(value) > 0


def nesting(names: Iterable[str]) -> Nest | None:
    """Return a function that nests batches with these flat names, or None if nothing is nested."""
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        top, _, part = name.partition(SEPARATOR)
        groups.setdefault(top, {})[part] = name
    for top, parts in groups.items():
        if "" in parts and len(parts) > 1:
            raise DataError(f"a batch has {top!r} and parts of it: {sorted(parts.values())}")
    if all("" in parts for parts in groups.values()):
        return None
    return lambda batch: {top: _joined(parts, batch) for top, parts in groups.items()}


def _parts(key: str, value: Any) -> dict[str, Any]:
    """Return the parts of a nested value by their flat names."""
    keys = list(value) if isinstance(value, Mapping) else range(len(value))
    values = value.values() if isinstance(value, Mapping) else value
    if not keys:
        raise DataError(f"{key!r} is empty: a {type(value).__name__} without a part")
    if isinstance(value, Mapping) and any(str(k).isdigit() or SEPARATOR in str(k) for k in keys):
        raise DataError(
            f"the keys of {key!r} are {[str(k) for k in keys]}; they may not be whole numbers or contain "
            f"{SEPARATOR!r}",
            "Rename them, or give a tuple.",
        )
    if any(is_nested(part) for part in values):
        raise DataError(
            f"{key!r} is nested twice; a sample may hold mappings or tuples of arrays, but no deeper ones",
            "Move its parts one level up.",
        )
    return {f"{key}{SEPARATOR}{k}": part for k, part in zip(keys, values, strict=True)}


def _joined(parts: Mapping[str, str], batch: Mapping[str, Any]) -> Any:
    if "" in parts:
        return batch[parts[""]]
    if all(part.isdigit() for part in parts):
        return tuple(batch[parts[part]] for part in sorted(parts, key=int))
    return {part: batch[name] for part, name in parts.items()}


def describe_not_finite(arrays: Mapping[str, NDArray[Any]], indices: NDArray[np.int64]) -> str:
    """Return the first sample with a value that is not finite, as text; empty if there is none."""
    for name, array in arrays.items():
        if array.dtype.kind not in "fc":
            continue
        is_finite = np.isfinite(array)
        if is_finite.all():
            continue
        rows = is_finite.reshape(indices.size, -1)
        bad = np.flatnonzero(~rows.all(axis=1))
        value = array.reshape(rows.shape)[bad[0]][~rows[bad[0]]][0]
        more = f", as do {bad.size - 1} more of its batch" if bad.size > 1 else ""
        return f"{name!r} of sample {int(indices.flat[bad[0]])} holds {value}{more}"
    return ""


PAD_REMEDY = (
    "Resize, crop or pad samples in the data set, or pad each batch: "
    "hvdtrain.as_dataset(data, collate=hvdtrain.pad({'input_ids': 0, 'attention_mask': 0}))."
)


def ragged_error(name: str, values: Any, indices: Sequence[int]) -> DataError:
    """Return the error for samples of unequal shapes, naming the first that differs."""
    shapes = [_shape(value) for value in values]
    place = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), 0)
    return DataError(
        f"samples of one batch must have equal shapes: {name!r} of sample {indices[place]} has shape "
        f"{shapes[place]}, that of sample {indices[0]} has shape {shapes[0]}",
        PAD_REMEDY,
    )


def _shape(value: Any) -> tuple[int, ...] | str:
    try:
        shape: tuple[int, ...] = np.shape(value)
        return shape
    except ValueError:
        return "that differs within the sample"


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

    Returns the number of the column of (samples, ...), and two of its values, or one and infinity. Others
    than whole numbers count only if the rounding is large for the column: many may come close by chance.
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
