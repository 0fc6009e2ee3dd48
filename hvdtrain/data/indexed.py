"""Data sets of records in files that have an index: Parquet, WebDataset's tars."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.blocks import Blocks, blocks_of
from hvdtrain.data.datasets import new_names, stack
from hvdtrain.data.numeric_columns import NumericColumns
from hvdtrain.task import Arrays

# from a record, by the names of its columns, to a sample as a data set's __getitem__ returns it
Decode = Callable[[dict[str, Any]], Any]


class Records(Protocol):
    """Records that are read by their numbers."""

    def __len__(self) -> int:
        """Return their number."""
        ...

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several records, decoded as far as the format says how."""
        ...

    def describe(self, index: int) -> str:
        """Return where a record lies, for messages."""
        ...


class Divided:
    """Records in parts, such as files.

    Args:
        sizes: the records of each part.
        what: what messages call the records.
    """

    def __init__(self, sizes: Iterable[int], what: str = "samples") -> None:
        self._firsts, self._what = np.cumsum([0, *sizes]), what

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _place(self, index: int) -> tuple[int, int]:
        """Return the part of a record, and its number there.

        Raises:
            IndexError: If there is no such record.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} {self._what}; found {index}")
        part = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return part, index - int(self._firsts[part])


class IndexedDataset:
    """Records as samples.

    Without a function that makes samples of them, columns that hold no numbers are left out, and so is what
    begins with two underscores.

    Args:
        records: the records.
        inputs: the column that the model is given, or several.
        targets: the column that the loss compares with.
        decode: makes a sample of a record, or None.

    Raises:
        DataError: If there are no records, or a column that is named does not exist or holds no numbers.
    """

    def __init__(
        self,
        records: Records,
        inputs: str | Sequence[str] | None = None,
        targets: str | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._records = records
        self._columns = NumericColumns(new_names(inputs, targets))
        self._decode = decode
        self.blocks: Blocks | None = blocks_of(records)
        if decode is None and len(records):
            (first,) = records.read([0])
            self._columns.learn(first, records.describe(0))

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell the user."""
        return self._columns.notes

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Arrays:
        return self._samples([int(index)])[0]

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples together."""
        return stack(self._samples(indices.tolist()), indices)

    def _samples(self, indices: list[int]) -> list[Arrays]:
        return [self._sample(record) for record in self._records.read(indices)]

    def _sample(self, record: dict[str, Any]) -> Arrays:
        return self._columns.arrays(record if self._decode is None else self._decode(record))
