"""Tables of texts with labels: CSV, TSV, JSONL and Parquet files, checked row by row."""

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.data.texts.files import check_regular
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.storage.files import open_regular

LONGEST = 1 << 24  # characters of a field; more means an unclosed quote or another kind of file
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class Row:
    """One row: its place, such as "line 3", and its text and label."""

    place: str
    text: Any
    label: Any


def _jsonl_rows(path: Path, text: str, label: str) -> Iterator[Row | BadSampleError]:
    """Yield the rows of a JSONL file: a JSON object per line; empty lines are skipped."""
    with _opened(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), ""), 1):
            if len(line) > LONGEST:
                raise DataError(f"{path}, line {number}: more than {LONGEST:,} characters")
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                message = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                yield BadSampleError(f"{path}, {place}: not JSON: {message[:200]}")
                continue
            if not isinstance(found, dict):
                yield BadSampleError(f"{path}, {place}: must be an object, found {line.strip()[:60]!r}")
            elif missing := [column for column in (text, label) if column not in found]:
                has = ", ".join(map(repr, list(found)[:20])) or "nothing"
                yield BadSampleError(f"{path}, {place}: has no {missing[0]!r}; it has {has}")
            else:
                yield Row(place, found[text], found[label])


def _opened(path: Path) -> TextIO:
    """Open a text file, in which bytes that are not UTF-8 become half characters, which rows may not have."""
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n")


def _separated_rows(path: Path, text: str, label: str, **options: Any) -> Iterator[Row | BadSampleError]:
    """Yield the rows of a file of separated values after a header; ``options`` are of ``csv.reader``.

    For a row that cannot be read an error is yielded; the rows after it follow.
    """
    columns = (text, label)
    csv.field_size_limit(max(LONGEST, csv.field_size_limit()))  # of the whole process
    with _opened(path) as file:
        rows = csv.reader(file, strict=True, **options)
        try:
            names = next(rows, None)
        except csv.Error as error:
            raise DataError(f"{path}, line {rows.line_num}: {error}") from None
        if names is None:
            raise DataError(f"{path} is empty (0 bytes)")
        if problem := _not_text("".join(names)):
            raise DataError(f"{path}, line 1: {problem}", "Save the file as UTF-8.")
        check_columns(path, names, columns)
        at = [names.index(column) for column in columns]
        while True:
            first = rows.line_num + 1
            try:
                if (values := next(rows, None)) is None:
                    return
            except csv.Error as error:
                if "unexpected end of data" in str(error):  # the rest of the file would be one row
                    problem = f"{path}, line {first}: a quote that begins there is never closed"
                    raise DataError(problem) from None
                yield BadSampleError(f"{path}, line {rows.line_num}: {error}")
                continue
            if values and len(values) != len(names):
                has = f"has {len(values)} values; the first line names {len(names)} columns"
                yield BadSampleError(f"{path}, line {first}: {has}")
            elif values:  # no empty line
                yield Row(f"line {first}", values[at[0]], values[at[1]])


def check_columns(path: Path, names: list[str], columns: tuple[str, str]) -> None:
    """Check that a table has each of these columns once."""
    for column in columns:
        if names.count(column) != 1:
            shown = ", ".join(repr(name[:40]) for name in names[:20]) + (", ..." if len(names) > 20 else "")
            problem = "has no column" if column not in names else "has more than one column"
            raise DataError(
                f"{path} {problem} {column!r}; its columns are {shown}",
                "Set them: --set task_options.text=COLUMN --set task_options.label=COLUMN.",
            )


_ROWS = 1024  # read at a time


def _parquet_rows(path: Path, text: str, label: str) -> Iterator[Row | BadSampleError]:
    """Yield the rows of a Parquet file with texts as strings and labels as strings or integers."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path} needs pyarrow, which is not installed", "pip install pyarrow") from None
    errors = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)
    number = 0
    try:
        with (
            open_regular(path) as source,
            parquet.ParquetFile(source, page_checksum_verification=True) as file,
        ):
            check_columns(path, file.schema_arrow.names, (text, label))
            for batch in file.iter_batches(_ROWS, columns=[text, label], use_threads=False):
                for pair in zip(batch.column(text), batch.column(label), strict=True):
                    number += 1
                    try:
                        yield Row(f"row {number}", *(value.as_py() for value in pair))
                    except UnicodeDecodeError as error:
                        yield BadSampleError(f"{path}, row {number}: not UTF-8: {error.reason}")
    except errors as error:
        if isinstance(error, DataError):
            raise
        message = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read as Parquet, after row {number}: {message}") from None


Reader = Callable[[Path, str, str], Iterator[Row | BadSampleError]]

READERS: dict[str, Reader] = {
    ".csv": partial(_separated_rows, delimiter=","),  # which may be quoted
    ".tsv": partial(_separated_rows, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".jsonl": _jsonl_rows,
    ".ndjson": _jsonl_rows,
    ".parquet": _parquet_rows,
}


@dataclass
class Table:
    """A table that is read row by row, and the rows that were left out of it."""

    path: Path
    text: str
    label: str
    bad_rows: str
    left_out: list[BadSampleError] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the place, the text and the label of each valid row."""
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
        problem = _not_text(f"{row.text}{row.label}")
        return BadSampleError(f"{where}: {problem}", "Save the file as UTF-8.") if problem else None


def _not_text(text: str) -> str:
    """Return what a text has that no text may have; empty if there is nothing."""
    if (found := _NO_TEXT.search(text)) is None:
        return ""
    code = ord(found[0])  # bytes that are not UTF-8 are read as such codes; JSON may have them, too
    if 0xDC80 <= code < 0xDD00:
        return f"contains the byte 0x{code - 0xDC00:02x}, which is not UTF-8"
    return f"contains {found[0]!r}, which is not a character of a text"


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]
