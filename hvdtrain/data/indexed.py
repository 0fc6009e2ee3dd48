"""Data sets of records in files: finding these, on this host or at a URL, and reading parts of them."""

import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.datasets import new_names, stack
from hvdtrain.data.naming import NumericColumns
from hvdtrain.data.order import Blocks
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.storage import urls as object_urls
from hvdtrain.storage.urls import StoreError, is_url
from hvdtrain.task import Arrays

Paths = str | Path | Sequence[str | Path]

_AT_ONCE = 16  # parts that are fetched at the same time
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def find_files(paths: Paths, suffix: str) -> list[str]:
    """Return the files that a user names, each with its whole path or URL."""
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    found = [file for one in named for text in expand_braces(str(one)) for file in _matches(text, suffix)]
    if not found:
        raise DataError(f"there are no {suffix} files at {', '.join(map(str, named)) or 'an empty list'}")
    if len(set(found)) < len(found):
        twice = next(file for place, file in enumerate(found) if file in found[:place])
        raise DataError(f"{twice} is named twice", "Each sample comes once per epoch: name each file once.")
    return found


def expand_braces(text: str) -> list[str]:
    """Return the texts that one with braces stands for: ``a-{00..02}.tar``, ``{train,extra}.tar``."""
    match = _BRACES.search(text)
    if match is None:
        return [text]
    parts = match[1].split(",")
    if numbers := _RANGE.fullmatch(match[1]):
        width = len(numbers[1])
        parts = [f"{number:0{width}}" for number in range(int(numbers[1]), int(numbers[2]) + 1)]
    before, after = text[: match.start()], text[match.end() :]
    return [one for part in parts for one in expand_braces(f"{before}{part}{after}")]


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    try:
        return object_urls.file_system(url)
    except StoreError as error:
        raise DataError(error.problem, error.remedy) from None


def _matches(path: str, suffix: str) -> list[str]:
    """Return the files that a path or URL without braces names, sorted."""
    if is_url(path):
        system, inside = file_system(path)
        if any(sign in inside for sign in "*?["):
            return sorted(system.unstrip_protocol(found) for found in system.glob(inside))
        if not inside.endswith(suffix) and system.isdir(inside):
            return sorted(system.unstrip_protocol(found) for found in system.glob(f"{inside}/*{suffix}"))
        return [path]
    path = os.path.expanduser(path)
    if os.path.isdir(path) and not path.endswith(suffix):
        path = os.path.join(glob.escape(path), f"*{suffix}")
    if any(sign in path for sign in "*?[") and not os.path.exists(path):
        return [os.path.abspath(found) for found in sorted(glob.glob(path, recursive=True))]
    if not os.path.isfile(path):
        raise DataError(f"{path} does not exist (looked in {os.getcwd()})")
    return [os.path.abspath(path)]


def open_file(path: str) -> BinaryIO:
    """Return a file or an object of a store, opened to be read."""
    if not is_url(path):
        return open(path, "rb")
    system, inside = file_system(path)
    return cast(BinaryIO, system.open(inside, "rb"))


def version_of(path: str) -> str:
    """Return a text that changes when a file does: its size and when it was changed, or the store's tag."""
    if is_url(path):
        system, inside = file_system(path)
        return f"{system.size(inside)} {system.ukey(inside)}"
    found = os.stat(path)
    return f"{found.st_size} {found.st_mtime_ns}"


def read_parts(parts: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Return parts of files (path, first byte, size); those of a store are fetched at the same time."""
    if not any(is_url(path) for path, _, _ in parts):
        return [_read_part(*part) for part in parts]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda part: _read_part(*part), parts))


def _read_part(path: str, first: int, size: int) -> bytes:
    try:
        if is_url(path):
            system, inside = file_system(path)
            data = cast(bytes, system.cat_file(inside, start=first, end=first + size))
        else:
            with open(path, "rb") as file:
                file.seek(first)
                data = file.read(size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(data) != size:
        raise DataError(f"{path} ends before byte {first + size:,}: it has changed since the job began")
    return data


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
