"""Texts with labels: tables of them (CSV, TSV, JSONL) as class numbers and tokens."""

import csv
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.texts.files import check_regular
from hvdtrain.errors import DataError
from hvdtrain.storage.text import some

# the place of a row, such as "line 3", its text and its label
Row = tuple[str, Any, Any]

_LONGEST = 1 << 24  # characters of a field; more means an unclosed quote or another kind of file
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_MOST_CLASSES = 10_000  # with more, the column probably holds identifiers

PADDING, START = 0, 1  # PADDING follows a text; START precedes it, for the output of a BERT-style model
_FIRST = 2  # the first token that represents a byte or word
_WORD = re.compile(r"\w+|[^\w\s]")


# bytes that are not UTF-8 become half characters, which rows may not have
_open_text = partial(Path.open, encoding="utf-8-sig", errors="surrogateescape", newline="\n")


def _jsonl_rows(path: Path, columns: tuple[str, str]) -> Iterator[Row]:
    """Yield the rows of a JSONL file: a JSON object per line; empty lines are skipped."""
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                found = json.loads(line)
                values = [found[column] for column in columns]
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, {place}: not JSON: {str(error)[:200]}") from None
            except (KeyError, TypeError):
                rule = f"must be an object with {columns[0]!r} and {columns[1]!r}"
                raise DataError(f"{path}, {place}: {rule}, found {line.strip()[:200]!r}") from None
            yield place, *values


def _separated_rows(path: Path, columns: tuple[str, str], **options: Any) -> Iterator[Row]:
    """Yield the rows of a file of separated values after a header; ``options`` are of ``csv.reader``."""
    csv.field_size_limit(max(_LONGEST, csv.field_size_limit()))  # of the whole process
    first = 1
    with _open_text(path) as file:
        rows = csv.reader(file, strict=True, **options)
        try:
            names = next(rows, [])
            if bad := next((column for column in columns if names.count(column) != 1), None):
                problem = "has more than one column" if bad in names else "has no column"
                shown = some([repr(name[:40]) for name in names], 20)
                raise DataError(
                    f"{path} {problem} {bad!r}; its columns are {shown}",
                    "Set them: --set task_options.text=COLUMN --set task_options.label=COLUMN.",
                )
            text, label = map(names.index, columns)
            first = rows.line_num + 1
            for row in rows:
                if row and len(row) != len(names):
                    has = f"has {len(row)} values; the first line names {len(names)} columns"
                    raise DataError(f"{path}, line {first}: {has}")
                if row:  # no empty line
                    yield f"line {first}", row[text], row[label]
                first = rows.line_num + 1
        except csv.Error as error:
            raise DataError(f"{path}, line {first}: {error}") from None


_READERS: dict[str, Callable[[Path, tuple[str, str]], Iterator[Row]]] = {
    ".csv": partial(_separated_rows, delimiter=","),  # which may be quoted
    ".tsv": partial(_separated_rows, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".jsonl": _jsonl_rows,
    ".ndjson": _jsonl_rows,
}


def rows_of(path: Path, columns: tuple[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the place, the text and the label of each row of a table, which are checked."""
    if not path.exists():
        raise DataError(f"{path} does not exist (looked in {Path.cwd()})", "Correct task_options.path.")
    if path.suffix.lower() not in _READERS:
        raise DataError(
            f"{path} has an unknown suffix for a table", f"Known suffixes: {', '.join(_READERS)}."
        )
    if check_regular(path) == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    for place, text, label in _READERS[path.suffix.lower()](path, columns):
        where = f"{path}, {place}"
        for name, value, kinds in zip(columns, (text, label), (str, str | int), strict=True):
            if not isinstance(value, kinds):
                wanted = "text" if kinds is str else "text or a whole number"
                found = "nothing" if value is None else repr(value)[:60]
                raise DataError(f"{where}: {name!r} must be {wanted}, found {found}")
            if not str(value).strip():
                raise DataError(f"{where}: {name!r} is empty")
            if bad := _NO_TEXT.search(str(value)):
                code = ord(bad[0])  # bytes that are not UTF-8 are read as such codes; JSON may have them, too
                what = f"{bad[0]!r}, which is not a character of a text"
                if 0xDC80 <= code < 0xDD00:
                    what = f"the byte 0x{code - 0xDC00:02x}, which is not UTF-8"
                raise DataError(f"{where}: contains {what}", "Save the file as UTF-8.")
        yield place, text, str(label).strip()


def read_tables(
    paths: Sequence[Path], columns: tuple[str, str], encoder: "Encoder"
) -> tuple[list[str], NDArray[np.int64], list[int]]:
    """Read tables row by row, and add their texts to the encoder; return what their labels are.

    These are the names of the classes, which are those of the first table, the class of each text, and the
    number of texts of each table.
    """
    found: dict[str, int] = {}
    numbers = array("i")
    sizes: list[int] = []
    for path in paths:
        before = len(numbers)
        for place, text, label in rows_of(path, columns):
            if sizes and label not in found:
                raise DataError(f"{path}, {place}: no text in {paths[0]} has the label {label[:60]!r}")
            numbers.append(found.setdefault(label, len(found)))
            encoder.add(text)
            if len(found) > _MOST_CLASSES:
                raise DataError(
                    f"{path}: column {columns[1]!r} has more than {_MOST_CLASSES:,} different labels",
                    "If it is the wrong column, set the right one: --set task_options.label=COLUMN.",
                )
        sizes.append(len(numbers) - before)
        if not sizes[-1]:
            raise DataError(f"{path} has no row")
    if len(found) < 2:
        raise DataError(
            f"{paths[0]}: all texts have the label {next(iter(found))[:60]!r}; "
            "there must be at least two labels"
        )
    names = in_order(found)
    place_of = {name: place for place, name in enumerate(names)}
    table_of_places = np.asarray([place_of[name] for name in found])
    return names, table_of_places[np.asarray(numbers)], sizes


def in_order(names: Iterable[str]) -> list[str]:
    """Return class names in order: by value if all are integers, otherwise by name."""
    listed = list(names)
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in listed):
        return sorted(listed, key=lambda name: (int(name), name))
    return sorted(listed)


def split(sizes: Sequence[int], share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the texts for training and for evaluation: a second table, or a share."""
    if len(sizes) > 1:
        return np.arange(sizes[0]), np.arange(sizes[0], sizes[0] + sizes[1])
    kept = max(1, round(sizes[0] * share)) if share else 0
    if kept >= sizes[0]:
        raise DataError(f"eval_fraction {share:g} leaves none of {sizes[0]} texts for training")
    shuffled = np.random.RandomState(seed).permutation(sizes[0])
    return np.sort(shuffled[kept:]), np.sort(shuffled[:kept])


class Encoder:
    """Makes tokens of texts that are added one by one: of words and punctuation marks, or of UTF-8 bytes."""

    def __init__(self, context: int, most: int | None) -> None:
        self._room, self._most = context - 1, most  # None: bytes
        self._numbers: dict[str, int] = {}  # all words, numbered in the order in which they were added
        self._tokens, self._lengths = array("i"), array("i")  # without padding until all are there

    def add(self, text: str) -> None:
        """Add a text; only the tokens that fit into the context are kept."""
        if self._most is None:
            tokens = [byte + _FIRST for byte in text[: self._room].encode()[: self._room]]
        else:
            words = islice((match[0] for match in _WORD.finditer(text.lower())), self._room)
            tokens = [self._numbers.setdefault(word, len(self._numbers)) + _FIRST for word in words]
        self._tokens.extend(tokens)
        self._lengths.append(len(tokens))

    def finish(self, train: NDArray[np.int64]) -> tuple[NDArray[np.int32], int]:
        """Return the tokens (texts, context) of all texts, given the training texts, and their vocabulary."""
        lengths = np.asarray(self._lengths, np.int64)
        rows = np.full((len(lengths), self._room + 1), PADDING, np.int32)
        rows[:, 0] = START
        rows[:, 1:][np.arange(self._room) < lengths[:, None]] = np.asarray(self._tokens, np.int32)
        if self._most is None:
            return rows, _FIRST + 256
        counts = np.bincount(rows[train].reshape(-1), minlength=len(self._numbers) + _FIRST)[_FIRST:]
        words = list(self._numbers)
        # by frequency, then in alphabetical order, so that the result does not depend on the order of rows
        ranked = sorted(np.flatnonzero(counts).tolist(), key=lambda number: (-counts[number], words[number]))
        unknown, known = _FIRST, np.asarray(ranked[: self._most], np.int64)
        table = np.full(len(words) + _FIRST, unknown, np.int32)
        table[:_FIRST] = PADDING, START
        table[known + _FIRST] = unknown + 1 + np.arange(len(known))
        return table[rows], unknown + 1 + len(known)
