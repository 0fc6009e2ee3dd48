"""Rows of Parquet files, read with pyarrow, which is imported only if there is such a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.data.texts.lines import Row, check_columns
from hvdtrain.errors import BadSampleError, DataError

_ROWS = 1024  # read at a time


def parquet_rows(path: Path, text: str, label: str) -> Iterator[Row | BadSampleError]:
    """Yield the rows of a Parquet file with texts as strings and labels as strings or integers.

    Raises:
        DataError: If pyarrow is not installed, the file is damaged, or a column is missing or of
            another type.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path} needs pyarrow, which is not installed", "pip install 'hvdtrain[parquet]'"
        ) from None
    errors = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)
    number = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            check_columns(path, schema.names, (text, label))
            _check_type(path, text, schema.field(text).type, _is_text(pa, schema.field(text).type), "text")
            kind = schema.field(label).type
            fits = _is_text(pa, kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
            _check_type(path, label, kind, fits, "text or whole numbers")
            for batch in file.iter_batches(_ROWS, columns=[text, label], use_threads=False):
                texts, labels = batch.column(text), batch.column(label)
                for i in range(batch.num_rows):
                    number += 1
                    try:
                        yield Row(f"row {number}", texts[i].as_py(), labels[i].as_py())
                    except UnicodeDecodeError as error:
                        yield BadSampleError(f"{path}, row {number}: not UTF-8: {error.reason}")
    except errors as error:
        if isinstance(error, DataError):
            raise
        message = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read as Parquet, after row {number}: {message}") from None


def _is_text(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _check_type(path: Path, column: str, kind: Any, fits: bool, rule: str) -> None:
    if not fits:
        raise DataError(f"{path}: column {column!r} must hold {rule}, found {kind}")
