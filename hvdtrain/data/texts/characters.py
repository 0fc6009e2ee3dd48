"""Characters as tokens: UTF-8 text as numbers below the number of distinct characters."""

import codecs
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.texts.files import MappedFiles
from hvdtrain.errors import DataError

_CHUNK = 1 << 20  # bytes that are scanned at a time
_BLOCK = 4096  # bytes per index entry: the index takes 0.2 % of the size of the text
_ALL = 0x110000  # number of Unicode code points
_BYTES_INSTEAD = "Save it as UTF-8, or set task_options.level=bytes, which accepts any file."


class CharacterTokens:
    """The characters of text files as a row of tokens; token k is the k-th distinct character.

    The text is scanned once for its distinct characters and for an index: the number of characters
    that begin before every 4096th byte. Windows are decoded when they are read, so the text stays
    on disk.

    Args:
        files: the text, in UTF-8.

    Raises:
        DataError: If the text is not UTF-8 or contains a NUL, with the file and the position.
    """

    def __init__(self, files: MappedFiles) -> None:
        self._files = files
        seen = np.zeros(_ALL, bool)
        begun = np.zeros(-(-len(files) // _BLOCK), np.int64)
        for start, raw, codes in _parts(files):
            seen[codes] = True
            begins = start + np.flatnonzero((raw & 0xC0) != 0x80)
            first = start // _BLOCK
            counts = np.bincount(begins // _BLOCK - first)
            begun[first : first + len(counts)] += counts
        self.characters = np.flatnonzero(seen)
        self._before = np.concatenate([[0], np.cumsum(begun)])
        self._table = np.zeros(int(self.characters[-1]) + 1, np.int32)
        self._table[self.characters] = np.arange(len(self.characters), dtype=np.int32)

    def __len__(self) -> int:
        return int(self._before[-1])

    @property
    def vocabulary(self) -> int:
        """Number of distinct characters."""
        return len(self.characters)

    def read(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int32]:
        """Return the tokens of windows, (windows, length).

        Args:
            starts: where each window begins, in characters.
            length: characters in each window.
        """
        if len(self) == len(self._files):  # every character is a single byte
            codes = self._files.read(starts, length).astype(np.int64)
        else:
            codes = np.stack([self._decoded(start, length) for start in starts.tolist()])
        if codes.max() >= len(self._table):
            raise DataError(_changed(self._files))
        return self._table[codes]

    def _decoded(self, start: int, length: int) -> NDArray[np.uint32]:
        first = int(np.searchsorted(self._before, start, side="right")) - 1
        last = int(np.searchsorted(self._before, start + length, side="left"))
        # the last character may end up to three bytes after its block
        raw = self._files.piece(first * _BLOCK, min(last * _BLOCK + 3, len(self._files)))
        head = int(np.argmax((raw & 0xC0) != 0x80))  # of a character that began in the block before
        text = raw[head:].tobytes().decode("utf-8", errors="ignore")
        skip = start - int(self._before[first])
        codes = np.frombuffer(text[skip : skip + length].encode("utf-32-le"), "<u4")
        if len(codes) != length:
            raise DataError(_changed(self._files))
        return codes


def _parts(files: MappedFiles) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.uint32]]]:
    """Yield the text in parts: where a part begins, its bytes, and the characters that end in it."""
    for number, path in enumerate(files.paths):
        decoder = codecs.getincrementaldecoder("utf-8")()
        base = int(files.ends[number - 1]) if number else 0
        whole = files.file(number)
        for start in range(0, len(whole), _CHUNK):
            raw = whole[start : start + _CHUNK]
            try:
                text = decoder.decode(raw.tobytes(), final=start + _CHUNK >= len(whole))
            except UnicodeDecodeError as error:
                # the decoder may have kept the beginning of a character from the part before
                place = start + len(raw) - len(error.object) + error.start
                byte = error.object[error.start]
                raise DataError(
                    f"{path} is not UTF-8 text: byte {place} (0x{byte:02x}) is not part of a valid character",
                    _BYTES_INSTEAD,
                ) from None
            if "\0" in text:
                place = start + int(np.argmin(raw))
                raise DataError(f"{path} is not text: byte {place} is NUL", _BYTES_INSTEAD)
            yield base + start, raw, np.frombuffer(text.encode("utf-32-le"), "<u4")


def _changed(files: MappedFiles) -> str:
    names = str(files.paths[0]) if len(files.paths) == 1 else f"one of {len(files.paths)} files"
    return f"{names} changed while it was being read"
