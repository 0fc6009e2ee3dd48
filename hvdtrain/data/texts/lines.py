"""Rows of tables in text files: CSV, TSV, JSONL."""

import contextlib
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import BadSampleError, DataError

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
