"""Rows of Parquet files, read with pyarrow, which is imported only if there is such a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.data.texts.lines import Row, check_columns
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.storage.files import open_regular

_ROWS = 1024  # read at a time
_ALWAYS_ALLOWED_BYTES = 1 << 28  # of one column in one row group, unpacked
_MOST_TIMES = 100  # that it may grow when more is unpacked; texts grow by 3 to 10


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
        with open_regular(path) as source, parquet.ParquetFile(source) as file:
            _check_expansion(path, file.metadata, (text, label))
            schema, packed = file.schema_arrow, _dictionaries(file.metadata, (text, label))
        # values of a dictionary stay in it: a few bytes can repeat a long one millions of times
        with (
            open_regular(path) as source,
            parquet.ParquetFile(source, page_checksum_verification=True, read_dictionary=packed) as file,
        ):
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


def _columns(metadata: Any, names: tuple[str, str]) -> Iterator[Any]:
    """Yield what a file says of the parts of these columns."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(place) for place in range(group.num_columns))
        yield from (column for column in columns if column.path_in_schema in names)


def _check_expansion(path: Path, metadata: Any, names: tuple[str, str]) -> None:
    """Check that no part of a column unpacks to far more than the file has.

    Raises:
        DataError: If one does.
    """
    for column in _columns(metadata, names):
        size, packed = column.total_uncompressed_size, column.total_compressed_size
        if size > max(_ALWAYS_ALLOWED_BYTES, _MOST_TIMES * packed):
            raise DataError(
                f"{path}: {packed:,} bytes of column {column.path_in_schema!r} unpack to {size:,}: a corrupt "
                "file or a decompression bomb",
                "If it is none, write it with smaller row groups.",
            )


def _dictionaries(metadata: Any, names: tuple[str, str]) -> list[str]:
    """Return those of the columns that have dictionaries of texts."""
    return sorted(
        {
            column.path_in_schema
            for column in _columns(metadata, names)
            if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page
        }
    )


def _is_text(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _check_type(path: Path, column: str, kind: Any, fits: bool, rule: str) -> None:
    if not fits:
        raise DataError(f"{path}: column {column!r} must hold {rule}, found {kind}")
