"""Tables of texts with labels: CSV, TSV, JSONL and Parquet files, checked row by row."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.data.texts.files import check_regular
from hvdtrain.data.texts.lines import Row, csv_rows, jsonl_rows, tsv_rows
from hvdtrain.data.texts.parquet import parquet_rows
from hvdtrain.errors import BadSampleError, DataError

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
