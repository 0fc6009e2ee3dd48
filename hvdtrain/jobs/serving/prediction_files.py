"""Files of predictions, written batch by batch: a table in Parquet, or arrays in an npz archive."""

import importlib.util
import math
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import EnvironmentFault, TaskError, UsageError

Rows = Mapping[str, NDArray[Any]]

_GROUP_BYTES = 1 << 26  # rows of a Parquet file that are written together


def check_suffix(path: Path) -> None:
    """Check that predictions can be written to a file of this name."""
    suffix = path.suffix
    if suffix not in _FORMATS:
        raise UsageError(
            f"--output {path}: predictions are written to files that end with {' or '.join(_FORMATS)}"
        )
    if suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise EnvironmentFault(
            f"--output {path} needs pyarrow", "pip install pyarrow, or write an .npz file."
        )


def _check_shape(name: str, array: NDArray[Any], before: NDArray[Any]) -> None:
    if array.shape[1:] != before.shape[1:]:
        raise TaskError(
            f"output {name!r} has shape {array.shape[1:]} for some samples and {before.shape[1:]} for those "
            "before; an array has one",
            "Give an output that ends with .parquet.",
        )


class NpzFile:
    """An npz archive with one array for each output, each written through a memory map."""

    def __init__(self, path: Path, samples: int) -> None:
        self._path = path
        self._samples = samples
        self._done = 0
        self._folder = path.with_name(f"{path.name}.arrays")
        self._arrays: dict[str, Any] = {}

    def add(self, rows: Rows) -> None:
        """Append rows."""
        self._folder.mkdir(exist_ok=True)
        for name, array in rows.items():
            if name not in self._arrays:
                shape = (self._samples, *array.shape[1:])
                self._arrays[name] = np.lib.format.open_memmap(
                    self._folder / f"{name}.npy", mode="w+", dtype=array.dtype, shape=shape
                )
            written = self._arrays[name]
            _check_shape(name, array, written)
            written[self._done : self._done + len(array)] = array
        self._done += len(next(iter(rows.values())))

    def finish(self) -> None:
        """Put the arrays into the archive."""
        with zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED) as archive:
            for name, array in self._arrays.items():
                array.flush()
                archive.write(self._folder / f"{name}.npy", f"{name}.npy")
        self._arrays.clear()
        shutil.rmtree(self._folder)


class Arrays:
    """Predictions that stay in memory, for those who predict from Python."""

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[Any]]] = {}

    def add(self, rows: Rows) -> None:
        """Append rows."""
        for name, array in rows.items():
            parts = self._parts.setdefault(name, [])
            _check_shape(name, array, parts[0] if parts else array)
            parts.append(np.array(array))

    def finish(self) -> None:
        """Do nothing: all rows are there."""

    def joined(self) -> dict[str, NDArray[Any]]:
        """Return the rows of each output as one array."""
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}


class ParquetFile:
    """A Parquet file with one column for each output; an output with several numbers is a column of lists."""

    def __init__(self, path: Path, samples: int) -> None:
        del samples
        self._path = path
        self._writer: Any = None
        self._tables: list[Any] = []

    def add(self, rows: Rows) -> None:
        """Append rows; they are written in groups."""
        import pyarrow as pa

        self._tables.append(pa.table({name: _column(array) for name, array in rows.items()}))
        if sum(table.nbytes for table in self._tables) >= _GROUP_BYTES:
            self._write_group()

    def finish(self) -> None:
        """Write the last rows, and what readers need."""
        if self._tables:
            self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.concat_tables(self._tables)
        self._tables.clear()
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)


# what is written; what it takes of memory does not grow with it, but for arrays
PredictionFile = NpzFile | ParquetFile | Arrays
_FORMATS: dict[str, Callable[[Path, int], PredictionFile]] = {".npz": NpzFile, ".parquet": ParquetFile}


def prediction_file(path: Path, samples: int) -> PredictionFile:
    """Return a file to write predictions to, in the format of its ending."""
    return _FORMATS[path.suffix](path, samples)


def _column(array: NDArray[Any]) -> Any:
    """Return an array as a column; all axes but the first become lists."""
    import pyarrow as pa

    column = pa.array(np.ascontiguousarray(array).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        count = math.prod(array.shape[:axis])
        offsets = np.arange(count + 1, dtype=np.int64) * array.shape[axis]
        column = pa.LargeListArray.from_arrays(pa.array(offsets), column)
    return column
