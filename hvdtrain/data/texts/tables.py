"""Tables of texts with labels: CSV, TSV, JSONL and Parquet files, checked row by row."""

import contextlib
import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.data.texts.files import check_regular
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.storage.files import open_regular

LONGEST = 1 << 24  # bytes of one line or field; more means an unclosed quote or another kind of file


@dataclass(frozen=True)
class Row:
    """One row: its place, such as "line 3", and its text and label."""

    place: str
    text: Any
    label: Any


def csv_rows(path: Path, text: str, label: str) -> Iterator[Row | BadSampleError]:
    """Yield the rows of a CSV file: comma-separated values, which may be quoted, after a header.

    For a row that cannot be read an error is yielded; the rows after it follow.

    Raises:
        DataError: If a column is missing or a quote is never closed.
    """
    lines = _Lines(path)
    rows = csv.reader(lines, strict=True)
    with _long_fields():
        yield from _separated(path, lines, rows, (text, label))


def tsv_rows(path: Path, text: str, label: str) -> Iterator[Row | BadSampleError]:
    """Yield the rows of a TSV file: values separated by tabs; quotes have no meaning."""
    lines = _Lines(path)
    rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    with _long_fields():
        yield from _separated(path, lines, rows, (text, label))


def jsonl_rows(path: Path, text: str, label: str) -> Iterator[Row | BadSampleError]:
    """Yield the rows of a JSONL file: a JSON object per line; empty lines are skipped."""
    lines = _Lines(path)
    while True:
        try:
            line = next(lines)
        except StopIteration:
            return
        except BadSampleError as error:
            yield error
            continue
        if not line.strip():
            continue
        place = f"line {lines.number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            message = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            yield BadSampleError(f"{path}, {place}: not JSON: {message[:200]}")
            continue
        if not isinstance(found, dict):
            yield BadSampleError(f"{path}, {place}: must be an object, found {line.strip()[:60]}")
            continue
        missing = [column for column in (text, label) if column not in found]
        if missing:
            has = ", ".join(map(repr, list(found)[:20])) or "nothing"
            yield BadSampleError(f"{path}, {place}: has no {missing[0]!r}; it has {has}")
            continue
        yield Row(place, found[text], found[label])


class _Lines:
    """The lines of a file, counted. For one that is not UTF-8 an error is raised; the others follow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self.number = 0
        self._offset = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        try:
            raw = self._file.readline(LONGEST + 1)
        except OSError as error:
            raise DataError(f"cannot read {self._path}: {error.strerror}") from None
        if not raw:
            self._file.close()
            raise StopIteration
        self.number += 1
        offset, self._offset = self._offset, self._offset + len(raw)
        where = f"{self._path}, line {self.number}"
        if len(raw) > LONGEST:
            self._file.close()
            raise DataError(
                f"{where} is longer than {LONGEST:,} bytes", "Check that it is a text file with rows."
            )
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            place = offset + error.start
            raise BadSampleError(
                f"{where}: byte {place} (0x{raw[error.start]:02x}) is not UTF-8", "Save the file as UTF-8."
            ) from None
        if "\0" in line:
            raise BadSampleError(f"{where}: byte {offset + raw.index(0)} is NUL")
        return line.removeprefix("\ufeff") if self.number == 1 else line  # the byte order mark


def _separated(
    path: Path, lines: _Lines, rows: Any, columns: tuple[str, str]
) -> Iterator[Row | BadSampleError]:
    try:
        names = next(rows, None)
    except csv.Error as error:
        raise DataError(f"{path}, line {lines.number}: {error}") from None
    if names is None:
        raise DataError(f"{path} is empty (0 bytes)")
    check_columns(path, names, columns)
    at = [names.index(column) for column in columns]
    while True:
        first = lines.number + 1
        try:
            values = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):  # the rest of the file would be one row
                raise DataError(f"{path}, line {first}: a quote that begins there is never closed") from None
            yield BadSampleError(f"{path}, line {lines.number}: {error}")
            continue
        except BadSampleError as error:
            yield error
            continue
        if not values:  # an empty line
            continue
        if len(values) != len(names):
            yield BadSampleError(
                f"{path}, line {first}: has {len(values)} values; the first line names {len(names)} columns"
            )
            continue
        yield Row(f"line {first}", values[at[0]], values[at[1]])


def check_columns(path: Path, names: list[str], columns: tuple[str, str]) -> None:
    """Check that a table has each of these columns once.

    Raises:
        DataError: If it does not, naming its columns.
    """
    for column in columns:
        if names.count(column) != 1:
            shown = ", ".join(repr(name[:40]) for name in names[:20]) + (", ..." if len(names) > 20 else "")
            problem = "has no column" if column not in names else "has more than one column"
            raise DataError(
                f"{path} {problem} {column!r}; its columns are {shown}",
                "Set them: --set task_options.text=COLUMN --set task_options.label=COLUMN.",
            )


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """Return a context in which a CSV field may be as long as a line; csv has one limit per process."""
    before = csv.field_size_limit(LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(before)


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
        with (
            open_regular(path) as source,
            parquet.ParquetFile(source, page_checksum_verification=True) as file,
        ):
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


Reader = Callable[[Path, str, str], Iterator[Row | BadSampleError]]

READERS: dict[str, Reader] = {
    ".csv": csv_rows,
    ".tsv": tsv_rows,
    ".jsonl": jsonl_rows,
    ".ndjson": jsonl_rows,
    ".parquet": parquet_rows,
}


@dataclass
class Table:
    """A table that is read row by row, and the rows that were left out of it.

    Args:
        path: the file, of the kind that its suffix says.
        text: the column with the text.
        label: the column with the label.
        bad_rows: "error" to raise an error for the first invalid row, "skip" to leave such rows out.
    """

    path: Path
    text: str
    label: str
    bad_rows: str
    left_out: list[BadSampleError] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the place, the text and the label of each valid row.

        Raises:
            BadSampleError: If a row is invalid and ``bad_rows`` is "error".
            DataError: If the file cannot be read.
        """
        if not self.path.exists():
            raise DataError(
                f"{self.path} does not exist (looked in {Path.cwd()})", "Correct task_options.path."
            )
        reader = READERS.get(self.path.suffix.lower())
        if reader is None and not self.path.is_dir():
            raise DataError(
                f"{self.path} has an unknown suffix for a table", f"Known suffixes: {', '.join(READERS)}."
            )
        if check_regular(self.path) == 0 or reader is None:
            raise DataError(f"{self.path} is empty (0 bytes)")
        for row in reader(self.path, self.text, self.label):
            problem = row if isinstance(row, BadSampleError) else self._problem(row)
            if problem is None:
                assert isinstance(row, Row)
                yield row.place, row.text, str(row.label).strip()
            else:
                self.leave_out(problem)

    def leave_out(self, problem: BadSampleError) -> None:
        """Count an invalid row, or raise its error, according to ``bad_rows``."""
        if self.bad_rows == "error":
            raise BadSampleError(
                problem.problem,
                problem.remedy or "Correct it, or set task_options.bad_rows=skip to leave it out.",
            )
        self.left_out.append(problem)

    def _problem(self, row: Row) -> BadSampleError | None:
        where = f"{self.path}, {row.place}"
        if not isinstance(row.text, str):
            return BadSampleError(f"{where}: {self.text!r} must be text, found {_shown(row.text)}")
        if not isinstance(row.label, str | int):
            return BadSampleError(
                f"{where}: {self.label!r} must be text or a whole number, found {_shown(row.label)}"
            )
        if not row.text.strip():
            return BadSampleError(f"{where}: {self.text!r} is empty")
        if not str(row.label).strip():
            return BadSampleError(f"{where}: {self.label!r} is empty")
        try:
            f"{row.text}{row.label}".encode()
        except UnicodeEncodeError as error:  # JSON may contain half of a surrogate pair
            return BadSampleError(
                f"{where}: contains {error.object[error.start]!r}, which is not a character"
            )
        return None


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]
