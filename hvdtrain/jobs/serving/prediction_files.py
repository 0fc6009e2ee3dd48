"""Predictions, kept batch by batch: as a table in Parquet, as arrays in an npz archive or in memory."""

import importlib.util
import math
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import EnvironmentFault, TaskError, UsageError

Rows = Mapping[str, NDArray[Any]]

_GROUP_BYTES = 1 << 26  # rows of a Parquet file that are written together


def check_suffix(path: Path) -> None:
    """Check that predictions can be written to a file of this name."""
    if path.suffix not in FORMATS:
        known = " or ".join(FORMATS)
        raise UsageError(f"--output {path}: predictions are written to files that end with {known}")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise EnvironmentFault(
            f"--output {path} needs pyarrow", "pip install pyarrow, or write an .npz file."
        )


class Arrays:
    """Predictions that stay in memory, for those who predict from Python."""

    def __init__(self) -> None:
        self._first: dict[str, NDArray[Any]] = {}
        self._parts: dict[str, list[NDArray[Any]]] = {}

    def add(self, rows: Rows) -> None:
        """Append rows, whose shapes must be those of the rows before."""
        for name, array in rows.items():
            before = self._first.setdefault(name, array[:0])
            if array.shape[1:] != before.shape[1:]:
                raise TaskError(
                    f"output {name!r} has shape {array.shape[1:]} for some samples and {before.shape[1:]} "
                    "for those before; an array has one",
                    "Give an output that ends with .parquet.",
                )
            self._keep(name, array)

    def finish(self) -> None:
        """Do nothing: all rows are there."""

    def joined(self) -> dict[str, NDArray[Any]]:
        """Return the rows of each output as one array."""
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}

    def _keep(self, name: str, array: NDArray[Any]) -> None:
        self._parts.setdefault(name, []).append(np.array(array))


class NpzFile(Arrays):
    """An npz archive with one array for each output, which takes no memory."""

    def __init__(self, path: Path, samples: int) -> None:
        super().__init__()
        self._path, self._samples = path, samples
        self._folder = path.with_name(f"{path.name}.arrays")
        self._folder.mkdir()
        self._files: dict[str, BinaryIO] = {}

    def finish(self) -> None:
        """Put the arrays into the archive."""
        with zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED) as archive:
            for name, file in self._files.items():
                file.close()
                archive.write(file.name, f"{name}.npy")
        shutil.rmtree(self._folder)

    def _keep(self, name: str, array: NDArray[Any]) -> None:
        kind = self._first[name].dtype
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.npy").open("wb")
            shape = (self._samples, *array.shape[1:])
            header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(self._files[name], header)
        self._files[name].write(array.astype(kind, copy=False).tobytes())


class ParquetFile:
    """A Parquet file with one column for each output; an output with several numbers is a column of lists."""

    def __init__(self, path: Path, _samples: int) -> None:
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


# by the ending of a file's name
FORMATS: dict[str, type[NpzFile | ParquetFile]] = {".npz": NpzFile, ".parquet": ParquetFile}


def _column(array: NDArray[Any]) -> Any:
    """Return an array as a column; all axes but the first become lists."""
    import pyarrow as pa

    column = pa.array(np.ascontiguousarray(array).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        count = math.prod(array.shape[:axis])
        offsets = np.arange(count + 1, dtype=np.int64) * array.shape[axis]
        column = pa.LargeListArray.from_arrays(pa.array(offsets), column)
    return column
