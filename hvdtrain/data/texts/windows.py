"""Windows of a long row of tokens: a data set for a language model."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.texts.files import MappedFiles
from hvdtrain.task import Arrays


class Tokens(Protocol):
    """A row of tokens, numbers below ``vocabulary``."""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        ...

    def __len__(self) -> int: ...

    def read(self, starts: NDArray[np.int64], length: int) -> NDArray[Any]:
        """Return the tokens of windows, (windows, length)."""
        ...


class ByteTokens:
    """The bytes of files as tokens."""

    vocabulary = 256

    def __init__(self, files: MappedFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def read(self, starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """Return the bytes of windows, (windows, length)."""
        return self._files.read(starts, length)


class Windows:
    """Windows of a row of tokens: ``context`` tokens as inputs, the token after each of them as target.

    Window k begins at ``k * stride``. In training, each window is shifted at random by less than
    ``stride`` in each epoch. So a window can begin at every token of the text, and with a stride of
    ``context`` an epoch still reads the text once.

    Args:
        tokens: the row.
        first: the first token of the part to use.
        last: end of that part, exclusive.
        context: tokens of one window.
        stride: tokens from the beginning of one window to that of the next.
    """

    def __init__(self, tokens: Tokens, first: int, last: int, context: int, stride: int) -> None:
        self._tokens = tokens
        self._first, self._context, self._stride = first, context, stride
        self._begins = last - first - context  # positions at which a window with its targets can begin

    def __len__(self) -> int:
        return max(0, -(-self._begins // self._stride))

    def __getitem__(self, index: int) -> Arrays:
        return {name: values[0] for name, values in self.batch(np.asarray([index])).items()}

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch windows without a shift."""
        return self._at(indices * self._stride)

    def augmented(self, indices: NDArray[np.int64], keys: NDArray[np.uint64]) -> Arrays:
        """Fetch windows, each shifted at random."""
        starts = indices * self._stride
        room = np.minimum(self._stride, self._begins - starts).astype(np.uint64)
        return self._at(starts + (keys % room).astype(np.int64))

    def _at(self, starts: NDArray[np.int64]) -> Arrays:
        tokens = self._tokens.read(self._first + starts, self._context + 1).astype(np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
