"""Text files: finding them, and their bytes as one long memory-mapped row."""

import platform
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.memory_map import MappedArray
from hvdtrain.errors import DataError
from hvdtrain.storage.files import NotAFileError, regular_size

_MOST_FILES = 30_000  # Linux allows a process 65,530 mappings
_LIBRARY_BYTES = 1_000_000  # of the source text of Python's library


def find_files(path: str, pattern: str) -> list[Path]:
    """Return a file, or the files of a folder and its sub-folders, in the order of their names.

    Args:
        path: the file or the folder.
        pattern: pattern of the names in a folder, such as ``*.txt``.

    Raises:
        DataError: If there is no such file or folder, or no file of the folder matches.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise DataError(f"{place} does not exist (looked in {Path.cwd()})", "Correct task_options.path.")
    if not place.is_dir():
        check_regular(place)
        return [place]
    try:
        found = [file for file in place.rglob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError, IndexError) as error:
        raise DataError(
            f"{pattern!r} is not a valid file pattern: {error}", "Use a pattern such as *.txt."
        ) from None
    if not found:
        raise DataError(
            f"no file in {place} or its sub-folders matches {pattern}",
            "Correct task_options.path or .pattern.",
        )
    if len(found) > _MOST_FILES:
        raise DataError(
            f"{place} has {len(found):,} files that match {pattern}; at most {_MOST_FILES:,} can be read",
            "Join them into fewer files.",
        )
    # by name, not in the order of the file system: the same on all hosts
    return sorted(found, key=lambda file: file.relative_to(place).as_posix())


def python_files() -> tuple[list[Path], str]:
    """Return the first modules of Python's standard library, about a million bytes, and a description.

    Every installation of the same version of Python has the same ones.

    Raises:
        DataError: If this Python was installed without source text.
    """
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
    """Check that a path is a file that can be read, and return its size in bytes.

    Raises:
        DataError: If it is missing or a folder, or a pipe or a device, which could block or never end.
    """
    try:
        size = regular_size(path)
        path.open("rb").close()
    except NotAFileError:
        raise DataError(f"{path} is not a file") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    return size


class MappedFiles:
    """The bytes of files, one file after the other, as one long row that stays on disk.

    Each file is mapped when it is first read.

    Args:
        paths: the files; empty ones are left out.

    Raises:
        DataError: If a file cannot be read, or all are empty.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        files = [MappedArray(path, 0, (check_regular(path),)) for path in paths]
        self._files = [file for file in files if len(file)]
        if not self._files:
            raise DataError(f"{paths[0]} is empty (0 bytes)" if len(paths) == 1 else "all files are empty")
        self.ends = np.cumsum([len(file) for file in self._files], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def paths(self) -> list[Path]:
        """The files that are not empty."""
        return [file.path for file in self._files]

    def file(self, number: int) -> NDArray[np.uint8]:
        """Return all bytes of one file, as a view of the mapped file."""
        return self._files[number].array()

    def piece(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes from ``start`` to before ``stop``, copied only if they are in several files."""
        parts = []
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            first = int(self.ends[number - 1]) if number else 0
            end = min(stop, int(self.ends[number]))
            parts.append(self.file(number)[start - first : end - first])
            start, number = end, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read(self, starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """Return the bytes of windows, (windows, length).

        Args:
            starts: where each window begins, in bytes.
            length: bytes in each window.
        """
        if len(self._files) == 1:
            windows: NDArray[np.uint8] = self.file(0)[starts[:, None] + np.arange(length)]
            return windows
        return np.stack([self.piece(start, start + length) for start in starts.tolist()])
