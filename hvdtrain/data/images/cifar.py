"""CIFAR-10's binary batches: a label byte, then 32x32 pixels each of red, green and blue.

Format: https://www.cs.toronto.edu/~kriz/cifar.html
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.images.sources import ArraySource, Found, reading
from hvdtrain.data.serialization import MappedArray
from hvdtrain.errors import DataError
from hvdtrain.storage.files import regular_size

SIDE = 32
RECORD_BYTES = 1 + 3 * SIDE * SIDE
CLASSES = 10
_FOLDER = "cifar-10-batches-bin"
_TRAIN = re.compile(r"data_batch_\d+\.bin")


class Records:
    """The images of several memory-mapped files of records.

    Args:
        parts: the records of each file, (records, bytes).
    """

    def __init__(self, parts: list[MappedArray]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    @property
    def shape(self) -> tuple[int, ...]:
        """(images, height, width, channels)."""
        return int(self._ends[-1]), SIDE, SIDE, 3

    def __getitem__(self, indices: Any) -> NDArray[np.uint8]:
        pixels = np.empty((len(indices), RECORD_BYTES - 1), np.uint8)
        files = np.searchsorted(self._ends, indices, side="right")
        for file in np.unique(files):
            part, inside = self._parts[file], files == file
            pixels[inside] = part[indices[inside] - (self._ends[file] - len(part)), 1:]
        return np.ascontiguousarray(pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))


def folder_of(path: Path) -> Path | None:
    """Return the folder with CIFAR-10 files: the path itself, or the folder of CIFAR-10's archive in it."""
    for folder in (path, path / _FOLDER):
        if folder.is_dir() and _train_files(folder):
            return folder
    return None


def find(path: Path) -> Found:
    """Open the batches in a folder."""
    folder = folder_of(path)
    if folder is None:
        raise DataError(f"{path} contains no training images: data_batch_1.bin, data_batch_2.bin, ...")
    test = folder / "test_batch.bin"
    return Found(
        "CIFAR-10 batches",
        _open_files(_train_files(folder)),
        _open_files([test]) if test.exists() else None,
        CLASSES,
    )


def _train_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _TRAIN.fullmatch(path.name))


def _open_files(paths: list[Path]) -> ArraySource:
    parts = [_open_file(path) for path in paths]
    labels = np.concatenate([part.array()[:, 0] for part in parts]).astype(np.int64)
    firsts = np.cumsum([0, *(len(part) for part in parts[:-1])]).tolist()
    return ArraySource(Records(parts), labels, partial(_where, paths, firsts))


def _open_file(path: Path) -> MappedArray:
    with reading(path):
        size = regular_size(path)
    count, rest = divmod(size, RECORD_BYTES)
    if rest or not count:
        kind = "is truncated" if rest else "contains no images"
        raise DataError(
            f"{path} {kind}: records have {RECORD_BYTES:,} bytes each; it has {size:,} bytes, "
            f"{count:,} records and {rest:,} bytes"
        )
    part = MappedArray(path, 0, (count, RECORD_BYTES))
    wrong = np.flatnonzero(part.array()[:, 0] >= CLASSES)
    if len(wrong):
        first = int(wrong[0])
        place = f"byte {first * RECORD_BYTES:,} (record {first})"
        raise DataError(
            f"{path}, {place}: label {part[first, 0]} is out of range; "
            f"there are {CLASSES} classes, numbered from 0"
        )
    return part


def _where(paths: list[Path], firsts: list[int], index: int) -> str:
    file = max(place for place, first in enumerate(firsts) if first <= index)
    record = index - firsts[file]
    return f"{paths[file]}, byte {record * RECORD_BYTES:,} (record {record})"
