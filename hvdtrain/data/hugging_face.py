"""Data sets of Hugging Face ``datasets``: their columns of numbers, read a batch per query."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.collate import ragged_error
from hvdtrain.data.naming import canonical, check_kept, left_out_notes, renamed
from hvdtrain.task import Arrays

# types of Hugging Face's columns, by their beginning
_NOT_NUMBERS = (
    "string",
    "large_string",
    "binary",
    "large_binary",
    "timestamp",
    "date",
    "time",
    "duration",
    "null",
    "dict",
)


class HuggingFaceDataset:
    """A Hugging Face data set read as numpy arrays, a batch per query; columns of text are left out."""

    def __init__(self, source: Any, names: Mapping[str, str]) -> None:
        kept, left_out = number_columns(source)
        check_kept(left_out, names)
        renamed(dict.fromkeys(kept), names)  # raises if a name does not exist
        self.notes = left_out_notes(left_out)
        self._source = source.select_columns(kept).with_format("numpy")
        self._names = names

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Arrays:
        return {name: column[0] for name, column in self.batch(np.asarray([index])).items()}

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples with one query."""
        columns = self._source[indices.tolist()]
        for name, value in columns.items():
            # lists of unequal lengths come as an array of arrays
            if value.dtype == object and len({np.shape(sample) for sample in value}) > 1:
                raise ragged_error(name, value, indices.tolist())
        return {name: canonical(value) for name, value in renamed(columns, self._names).items()}


def number_columns(source: Any) -> tuple[list[str], list[str]]:
    """Return the columns of a Hugging Face data set that hold numbers or images, and the others.

    Columns that the user took out of its format are in neither.
    """
    columns = source.format["columns"] or source.column_names
    left_out = [name for name in columns if not _holds_numbers(source.features[name])]
    return [name for name in columns if name not in left_out], left_out


def _holds_numbers(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return False
    if isinstance(feature, list):
        return all(map(_holds_numbers, feature))
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _holds_numbers(inner)
    return not str(getattr(feature, "dtype", "")).startswith(_NOT_NUMBERS)
