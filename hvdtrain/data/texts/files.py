"""Text files: finding them, and their bytes as one long memory-mapped row."""

import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.serialization import mapped
from hvdtrain.errors import DataError
from hvdtrain.storage.files import NotAFileError, regular_size
from hvdtrain.task import Arrays

_LIBRARY_BYTES = 1_000_000  # of the source text of Python's library


def find_files(path: str, pattern: str) -> list[Path]:
    """Return a file, or the files of a folder and its sub-folders, in the order of their names."""
    place = Path(path).expanduser()
    if not place.exists():
        raise DataError(f"{place} does not exist (looked in {Path.cwd()})", "Correct task_options.path.")
    if not place.is_dir():
        check_regular(place)
        return [place]
    try:
        found = [file for file in place.rglob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError, IndexError) as error:
        raise DataError(f"{pattern!r} is not a valid file pattern: {error}") from None
    if not found:
        raise DataError(
            f"no file in {place} or its sub-folders matches {pattern}",
            "Correct task_options.path or .pattern.",
        )
    # by name, not in the order of the file system: the same on all hosts
    return sorted(found, key=lambda file: file.relative_to(place).as_posix())


def python_files() -> tuple[list[Path], str]:
    """Return the first modules of Python's standard library, about a million bytes, and a description."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = (file for file in folder.glob("*.py") if file.stem in sys.stdlib_module_names)
    found, size = [], 0
    for file in sorted(modules, key=lambda file: file.name):
        size += file.stat().st_size
        if size > _LIBRARY_BYTES:
            break
        found.append(file)
    if not found:
        raise DataError(
            f"this Python has no source text in {folder}",
            "Use a text of your own: --set task_options.path=FILE.",
        )
    version = platform.python_version()
    return found, f"Python {version}'s library ({len(found)} modules, {found[0].stem} to {found[-1].stem})"


def check_regular(path: Path) -> int:
    """Check that a path is a file that can be read, and return its size in bytes."""
    try:
        size = regular_size(path)
        path.open("rb").close()
    except NotAFileError:
        raise DataError(f"{path} is not a file") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    return size


class MappedFiles:
    """The bytes of files, one file after the other, as one long row that stays on disk."""

    vocabulary = 256  # its bytes may be tokens

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = [path for path in paths if check_regular(path)]
        if not self.paths:
            raise DataError(f"{paths[0]} is empty (0 bytes)" if len(paths) == 1 else "all files are empty")
        self._files = [mapped(path) for path in self.paths]
        self.ends = np.cumsum([len(file) for file in self._files], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """Return the bytes of windows, (windows, length)."""
        found = np.empty((len(starts), length), np.uint8)
        for row, start in zip(found, starts.tolist(), strict=True):
            number, done = int(np.searchsorted(self.ends, start, side="right")), 0
            while done < length:
                file, left = self._files[number], int(self.ends[number]) - start - done
                part = file[len(file) - left :][: length - done]
                row[done : done + len(part)] = part
                number, done = number + 1, done + len(part)
        return found


class Windows:
    """Windows of a row of tokens: ``context`` tokens as inputs, the token after each of them as target.

    Window k begins at ``k * stride`` of the part of the row from ``first`` to before ``last``. In training,
    each window is shifted at random by less than ``stride`` in each epoch. So a window can begin at every
    token of the text, and with a stride of ``context`` an epoch still reads the text once.
    """

    def __init__(self, tokens: "Tokens", first: int, last: int, context: int, stride: int) -> None:
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


_CHUNK = 1 << 20  # characters that are read at a time
_ALL = 0x110000  # number of Unicode code points
_BYTES_INSTEAD = "Save it as UTF-8, or set task_options.level=bytes, which accepts any file."


class CharacterTokens:
    """The characters of UTF-8 files as a row of tokens in memory; token k is the k-th distinct character."""

    def __init__(self, files: MappedFiles) -> None:
        seen = np.zeros(_ALL, bool)
        for codes in _characters(files):
            seen[codes] = True
        self.characters = np.flatnonzero(seen)
        self.vocabulary = len(self.characters)
        table = np.zeros(_ALL, np.min_scalar_type(self.vocabulary - 1))
        table[self.characters] = np.arange(self.vocabulary)
        parts = []
        for codes in _characters(files):
            if not seen[codes].all():
                raise DataError(f"{files.paths[0].parent}: a text was changed while it was being read")
            parts.append(table[codes])
        self._tokens = np.concatenate(parts)

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, starts: NDArray[np.int64], length: int) -> NDArray[Any]:
        """Return the tokens of windows, (windows, length); ``starts`` and ``length`` are in characters."""
        found: NDArray[Any] = self._tokens[starts[:, None] + np.arange(length)]
        return found


Tokens = MappedFiles | CharacterTokens


def _characters(files: MappedFiles) -> Iterator[NDArray[np.uint32]]:
    """Yield the characters of a text in parts."""
    for path in files.paths:
        with path.open(encoding="utf-8", newline="") as file:
            try:
                while text := file.read(_CHUNK):
                    if "\0" in text:
                        raise DataError(f"{path} is not text: it contains NUL", _BYTES_INSTEAD)
                    yield np.frombuffer(text.encode("utf-32-le"), "<u4")
            except UnicodeDecodeError as error:
                byte = f"0x{error.object[error.start]:02x}"
                raise DataError(f"{path} is not UTF-8 text: {byte}: {error.reason}", _BYTES_INSTEAD) from None
