"""Texts with labels: reading tables into class numbers and tokens, and splitting them."""

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.texts.tables import Table
from hvdtrain.errors import BadSampleError, DataError

PADDING, START = 0, 1  # PADDING follows a text; START precedes it, for the output of a BERT-style model
_FIRST = 2  # the first token that represents a byte or word
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Encoded:
    """Texts as tokens.

    Args:
        tokens: (texts, context) of int32: ``START``, the text's tokens, ``PADDING``.
        vocabulary: number of different tokens.
    """

    tokens: NDArray[np.int32]
    vocabulary: int


class ByteEncoder:
    """Encodes the UTF-8 bytes of texts that are added one by one, which needs no vocabulary."""

    def __init__(self, context: int) -> None:
        self._rows = _Rows(context)

    def add(self, text: str) -> None:
        """Add a text; only the tokens that fit into the context are kept."""
        self._rows.add([byte + _FIRST for byte in text[: self._rows.room].encode()[: self._rows.room]])

    def finish(self, train: NDArray[np.int64]) -> Encoded:
        """Return the tokens of all texts."""
        return Encoded(self._rows.padded(), _FIRST + 256)


class WordEncoder:
    """Encodes words in lower case and single punctuation marks by a vocabulary of the training texts."""

    def __init__(self, context: int, most: int) -> None:
        self._rows = _Rows(context)
        self._most = most
        self._numbers: dict[str, int] = {}  # all words, numbered in the order in which they were added

    def add(self, text: str) -> None:
        """Add a text."""
        found: list[int] = []
        for match in _WORD.finditer(text.lower()):
            if len(found) == self._rows.room:
                break
            found.append(self._numbers.setdefault(match[0], len(self._numbers)) + _FIRST)
        self._rows.add(found)

    def finish(self, train: NDArray[np.int64]) -> Encoded:
        """Return the tokens of all texts by the vocabulary of the training texts."""
        rows = self._rows.padded()
        counts = np.bincount(rows[train].reshape(-1), minlength=len(self._numbers) + _FIRST)[_FIRST:]
        words = list(self._numbers)
        # by frequency, then in alphabetical order, so that the result does not depend on the order of rows
        ranked = sorted(np.flatnonzero(counts).tolist(), key=lambda number: (-counts[number], words[number]))
        unknown, known = _FIRST, np.asarray(ranked[: self._most], np.int64)
        table = np.full(len(words) + _FIRST, unknown, np.int32)
        table[:_FIRST] = PADDING, START
        table[known + _FIRST] = unknown + 1 + np.arange(len(known))
        return Encoded(table[rows], unknown + 1 + len(known))


Encoder = ByteEncoder | WordEncoder


class _Rows:
    """Rows of tokens, stored without padding until all are there."""

    def __init__(self, context: int) -> None:
        self.room = context - 1
        self._tokens, self._lengths = array("i"), array("i")

    def add(self, tokens: list[int]) -> None:
        self._tokens.extend(tokens)
        self._lengths.append(len(tokens))

    def padded(self) -> NDArray[np.int32]:
        lengths = np.asarray(self._lengths, np.int64)
        result = np.full((len(lengths), self.room + 1), PADDING, np.int32)
        result[:, 0] = START
        result[:, 1:][np.arange(self.room) < lengths[:, None]] = np.asarray(self._tokens, np.int32)
        return result


_MOST_CLASSES = 10_000  # with more, the column probably holds identifiers


@dataclass(frozen=True)
class Labels:
    """The labels of all texts."""

    names: list[str]
    numbers: NDArray[np.int64]
    sizes: list[int]


def read_tables(tables: Sequence[Table], encoder: Encoder) -> Labels:
    """Read tables row by row, one after the other, and add their texts to the encoder.

    The classes are those of the first table.
    """
    found: dict[str, int] = {}
    numbers = array("i")
    sizes: list[int] = []
    for table in tables:
        before = len(numbers)
        for place, text, label in table.rows():
            if sizes and label not in found:
                problem = f"{table.path}, {place}: no text in {tables[0].path} has the label {label[:60]!r}"
                table.leave_out(BadSampleError(problem))
                continue
            numbers.append(found.setdefault(label, len(found)))
            encoder.add(text)
            if len(found) > _MOST_CLASSES:
                raise DataError(
                    f"{table.path}: column {table.label!r} has more than {_MOST_CLASSES:,} different labels",
                    "If it is the wrong column, set the right one: --set task_options.label=COLUMN.",
                )
        sizes.append(len(numbers) - before)
        if not sizes[-1]:
            first = table.left_out[0].problem if table.left_out else ""
            left_out = f"; left out: {len(table.left_out)}, the first: {first}" if first else ""
            raise DataError(f"{table.path} has no valid row{left_out}")
    if len(found) < 2:
        raise DataError(
            f"{tables[0].path}: all texts have the label {next(iter(found))[:60]!r}; "
            "there must be at least two labels"
        )
    names = in_order(found)
    place_of = {name: place for place, name in enumerate(names)}
    table_of_places = np.asarray([place_of[name] for name in found])
    return Labels(names, table_of_places[np.asarray(numbers)], sizes)


def in_order(names: Iterable[str]) -> list[str]:
    """Return class names in order: by value if all are integers, otherwise by name."""
    listed = list(names)
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in listed):
        return sorted(listed, key=lambda name: (int(name), name))
    return sorted(listed)


def split(sizes: Sequence[int], share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the texts for training and for evaluation.

    Args:
        sizes: number of texts in each table; a second table is for evaluation only.
        share: fraction of a single table that is for evaluation; at least one text if it is above 0.
        seed: seed of the split.
    """
    if len(sizes) > 1:
        return np.arange(sizes[0]), np.arange(sizes[0], sizes[0] + sizes[1])
    kept = max(1, round(sizes[0] * share)) if share else 0
    if kept >= sizes[0]:
        raise DataError(f"eval_fraction {share:g} leaves none of {sizes[0]} texts for training")
    shuffled = np.random.RandomState(seed).permutation(sizes[0])
    return np.sort(shuffled[kept:]), np.sort(shuffled[:kept])
