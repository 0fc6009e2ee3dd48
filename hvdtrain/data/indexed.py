"""Data sets of records in files that have an index: Parquet, WebDataset's tars."""

import io
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.datasets import new_names, stack
from hvdtrain.data.naming import NumericColumns
from hvdtrain.data.order import Blocks
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.task import Arrays

_IMAGES = ("JPEG", "PNG", "WEBP", "BMP", "PPM")
_PICKLES = ("pkl", "pickle", "pyd", "pt", "pth")


def decode_file(kind: str, data: bytes, where: str) -> Any:
    """Return the content of a file of a sample: an array, a number, text, what JSON holds, or its bytes."""
    last = kind.rpartition(".")[2]
    if last in _PICKLES:
        raise DataError(
            f"{where} has a file .{kind}: pickles are not loaded, since loading one runs the code in it",
            "Store arrays as .npy, or give decode, a function that makes a sample of the files' bytes.",
        )
    if last not in _DECODERS:
        return data
    try:
        return _DECODERS[last](data)
    except Exception as error:
        raise BadSampleError(f"{where}: .{kind} cannot be decoded: {error}") from None


def image(data: bytes) -> NDArray[Any]:
    """Return an image as (height, width, 3) of bytes, or (height, width, 1) if it is grey."""
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=_IMAGES) as opened:
        is_grey = opened.mode in ("1", "L")
        if opened.mode.startswith("I"):  # "I;16" or "I": convert("L") would clip them
            return np.asarray(opened).astype(np.int32)[:, :, None]
        found = np.asarray(opened.convert("L" if is_grey else "RGB"))
    return found[:, :, None] if is_grey else found


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "ppm"), image),
    "json": json.loads,
    "npy": _array,
    "npz": lambda data: dict(_array(data)),
}


# from a record, by the names of its columns, to a sample as a data set's __getitem__ returns it
Decode = Callable[[dict[str, Any]], Any]


class Records:
    """Records in parts of files, which are read by their numbers."""

    blocks: Blocks | None = None

    def __init__(self, sizes: Iterable[int], name: str) -> None:
        self._firsts, self.name = np.cumsum([0, *sizes]), name

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _place(self, index: int) -> tuple[int, int]:
        """Return the part of a record, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} samples; found {index}")
        part = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return part, index - int(self._firsts[part])

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several records, decoded as far as the format says how."""
        raise NotImplementedError


class IndexedDataset:
    """Records as samples. Without ``decode``, what holds no numbers is left out."""

    def __init__(
        self, records: Records, inputs: str | Sequence[str] | None, targets: str | None, decode: Decode | None
    ) -> None:
        self._records = records
        self._columns = NumericColumns(new_names(inputs, targets))
        self._decode = decode
        self.blocks = records.blocks
        if decode is None and len(records):
            self._columns.learn(records.read([0])[0], records.name)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to report to the user."""
        return self._columns.notes

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Arrays:
        return self._samples([int(index)])[0]

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples together."""
        return stack(self._samples(indices.tolist()), indices)

    def _samples(self, indices: list[int]) -> list[Arrays]:
        decode = self._decode or (lambda record: record)
        return [self._columns.arrays(decode(record)) for record in self._records.read(indices)]
