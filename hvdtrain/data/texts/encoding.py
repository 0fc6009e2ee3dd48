"""Encoding the texts of a table as rows of tokens of equal length, for a classifier."""

import re
from array import array
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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


class Encoder(Protocol):
    """Encodes texts that are added one by one."""

    def add(self, text: str) -> None:
        """Add a text; only the tokens that fit into the context are kept."""
        ...

    def finish(self, train: NDArray[np.int64]) -> Encoded:
        """Return the tokens of all texts.

        Args:
            train: indices of the training texts; only they contribute to a vocabulary.
        """
        ...


class ByteEncoder:
    """Encodes the UTF-8 bytes of a text, which needs no vocabulary."""

    def __init__(self, context: int) -> None:
        self._rows = _Rows(context)

    def add(self, text: str) -> None:
        """Add a text."""
        self._rows.add([byte + _FIRST for byte in text[: self._rows.room].encode()[: self._rows.room]])

    def finish(self, train: NDArray[np.int64]) -> Encoded:
        """Return the tokens of all texts."""
        return Encoded(self._rows.padded(), _FIRST + 256)


class WordEncoder:
    """Encodes words in lower case and single punctuation marks by a vocabulary of the training texts.

    Args:
        context: tokens in a row.
        most: size of the vocabulary, the most frequent words; other words become one token, "unknown".
    """

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
