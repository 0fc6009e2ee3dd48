"""Data sets of records in files that have an index: Parquet, WebDataset's tars, MDS."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.blocks import Blocks, blocks_of
from hvdtrain.data.datasets import new_names, stack
from hvdtrain.data.naming import canonical, check_kept, left_out_notes, named
from hvdtrain.data.numeric import is_numeric
from hvdtrain.errors import DataError
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
        self._names = new_names(inputs, targets)
        self._decode = decode
        self._left_out: frozenset[str] = frozenset()
        self.blocks: Blocks | None = blocks_of(records)
        self.notes: tuple[str, ...] = ()
        if decode is None and len(records):
            (first,) = records.read([0])
            left_out = [name for name, value in first.items() if not is_numeric(value)]
            check_kept(left_out, self._names)
            self._left_out = frozenset(left_out)
            self.notes = left_out_notes([name for name in left_out if not name.startswith("__")])
            if len(left_out) == len(first):
                raise DataError(
                    f"no column of {records.describe(0)} holds numbers; it has {sorted(first)}",
                    "Give decode, a function that makes a sample of a record.",
                )

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
        item: Any = (
            {name: value for name, value in record.items() if name not in self._left_out}
            if self._decode is None
            else self._decode(record)
        )
        return {name: canonical(value) for name, value in named(item, self._names).items()}
