"""Parquet files as a data set: read by row group, of which a few are kept decoded."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.datasets import new_names, stack
from hvdtrain.data.found_files import Paths, find_files, open_file
from hvdtrain.data.naming import NumericColumns
from hvdtrain.data.order import Blocks
from hvdtrain.errors import DataError
from hvdtrain.storage.urls import is_url
from hvdtrain.task import Arrays

_FOOTERS = 16  # that are read at the same time
_MIXED = 8

# from a row, by the names of its columns, to a sample as a data set's __getitem__ returns it
Decode = Callable[[dict[str, Any]], Any]


def open_parquet(
    paths: Paths,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    decode: Decode | None = None,
    shuffle_blocks: int = _MIXED,
) -> "ParquetDataset":
    """Return the rows of Parquet files as a data set, which is read by row group.

    Row groups are shuffled in each epoch, and rows within ``shuffle_blocks`` of them, so that only few row
    groups are in memory. Each row comes once per epoch; the order depends on the seed and the files alone.

    Args:
        paths: files, folders, patterns or URLs; see docs/streams.md.
        inputs: the column that the model is given, or several.
        targets: the column that the loss compares with.
        columns: the columns to read; all by default.
        decode: a function that makes a sample of a row, which is a dict. Without it, columns of numbers are
            used and others left out.
        shuffle_blocks: row groups that are shuffled together; twice as many may be in memory.

    Raises:
        DataError: If the files cannot be used.
    """
    if shuffle_blocks < 1:
        raise DataError(f"shuffle_blocks must be 1 or more, found {shuffle_blocks}")
    files, numbers = find_files(paths, ".parquet"), NumericColumns(new_names(inputs, targets))
    return ParquetDataset(files, columns, shuffle_blocks, numbers, decode)


class _Group(NamedTuple):
    """A row group: its file, its number there, and its rows."""

    path: str
    number: int
    rows: int


class ParquetDataset:
    """Rows as samples, read by row group. Without ``decode``, what holds no numbers is left out."""

    def __init__(
        self,
        paths: Sequence[str],
        read: Sequence[str] | None,  # the columns to read
        mixed: int,
        columns: NumericColumns,
        decode: Decode | None,
    ) -> None:
        with ThreadPoolExecutor(_FOOTERS) as pool:
            footers = list(pool.map(_footer, paths))
        first = footers[0][1]
        for path, (_, found) in zip(paths, footers, strict=True):
            if found != first:
                raise DataError(
                    f"{path} has the columns {', '.join(map(' '.join, found))}, and {paths[0]} has "
                    f"{', '.join(map(' '.join, first))}",
                    "Files of one data set have the same columns with the same types.",
                )
        known = [name for name, _ in first]
        if lost := next((name for name in read or () if name not in known), None):
            raise DataError(f"{paths[0]} has no column {lost!r}; it has {', '.join(known)}")
        self._read, self._mixed = None if read is None else list(read), mixed
        self._groups = [group for groups, _ in footers for group in groups if group.rows]
        sizes = tuple(group.rows for group in self._groups)
        self.ordering = Blocks(sizes, mixed) if sizes else None
        self._firsts = np.cumsum([0, *sizes])
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Future[dict[str, Any]]] = OrderedDict()
        self._columns, self._decode = columns, decode
        if decode is None and len(self):
            columns.learn(self._row(0), f"the first row of {self._groups[0].path}")

    @property
    def notes(self) -> tuple[str, ...]:
        """What to report to the user."""
        return self._columns.notes

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Arrays:
        row = self._row(int(index))
        return self._columns.arrays(row if self._decode is None else self._decode(row))

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples together."""
        return stack([self[index] for index in indices.tolist()], indices)

    def _row(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} samples; found {index}")
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        group, row = self._group(number), index - self._firsts[number]
        return {name: values[row] for name, values in group.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_kept": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def _group(self, number: int) -> dict[str, Any]:
        """Return the columns of a row group; the ones that were used last are kept."""
        with self._lock:
            is_first = number not in self._kept
            group = self._kept.setdefault(number, Future())
            self._kept.move_to_end(number)
            if len(self._kept) > 2 * self._mixed:
                self._kept.popitem(last=False)
        if is_first:  # other threads that need it wait, and those that need another group do not
            try:
                group.set_result(self._decoded(number))
            except BaseException as error:
                group.set_exception(error)
                with self._lock:
                    self._kept.pop(number, None)  # another reading may succeed
        return group.result()

    def _decoded(self, number: int) -> dict[str, Any]:
        """Return the columns of a row group, each as an array or a list of its values."""
        import pyarrow.parquet as pq

        group = self._groups[number]
        where = f"row group {group.number} of {group.path}"
        try:
            with open_file(group.path) as file:
                table = pq.ParquetFile(file).read_row_group(group.number, columns=self._read)
        except Exception as error:  # pyarrow raises OSError, ArrowInvalid and more for damaged files
            raise DataError(f"{where} cannot be read: {error}") from error
        if table.num_rows != group.rows:
            raise DataError(f"{where} has {table.num_rows:,} rows; it had {group.rows:,} when the job began")
        return {
            name: _values(column.combine_chunks(), f"column {name!r} in {where}")
            for name, column in zip(table.column_names, table.columns, strict=True)
        }


def _footer(path: str) -> tuple[list[_Group], list[tuple[str, str]]]:
    """Return a file's row groups, and its columns with their types."""
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"{path} needs pyarrow", "pip install pyarrow") from None
    try:
        with open_file(path) as file:
            found = pq.ParquetFile(file)
            rows = [found.metadata.row_group(k).num_rows for k in range(found.metadata.num_row_groups)]
            columns = [(field.name, str(field.type)) for field in found.schema_arrow]
    except Exception as error:
        kind = "" if is_url(path) else " is damaged or no Parquet file"
        raise DataError(f"{path}{kind or ' cannot be read'}: {error}") from error
    return [_Group(path, number, count) for number, count in enumerate(rows)], columns


def _values(column: Any, where: str) -> Any:
    """Return a column of pyarrow as an array, or as a list of what is no number or of unequal lengths."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if column.null_count and (is_list or is_number):
        raise DataError(
            f"{where} has {column.null_count:,} missing values",
            "Fill in or drop rows with missing values, or leave the column out: columns=[...].",
        )
    if is_number:
        return column.to_numpy(zero_copy_only=False)
    if not is_list:
        return column.to_pylist()
    values = _values(column.flatten(), where)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    if isinstance(values, np.ndarray) and len(set(lengths.tolist())) == 1:
        return values.reshape(len(lengths), int(lengths[0]), *values.shape[1:])
    return [values[end - length : end] for length, end in zip(lengths, np.cumsum(lengths), strict=True)]
