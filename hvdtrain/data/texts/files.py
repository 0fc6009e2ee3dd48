"""Text files: which ones a path means, and their bytes as one long row, memory-mapped."""

import platform
import stat
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import DataError

_MOST_FILES = 30_000  # a process may have 65,530 mappings
_OWN_BYTES = 1_000_000  # of Python's own source text


def find_files(path: str, pattern: str) -> list[Path]:
    """Give a file, or the files of a folder and the folders below it, in the order of their names.

    Args:
        path: the file or the folder.
        pattern: which names in a folder, such as ``*.txt``.

    Raises:
        DataError: where there is no such file or folder, or nothing in the folder fits.
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
        raise DataError(f"{pattern!r} is no pattern for files: {error}", "Write one such as *.txt.") from None
    if not found:
        raise DataError(
            f"no file in {place} or below it fits {pattern}", "Correct task_options.path or .pattern."
        )
    if len(found) > _MOST_FILES:
        raise DataError(
            f"{place} has {len(found):,} files that fit {pattern}; at most {_MOST_FILES:,} are read",
            "Join them into fewer files.",
        )
    # by name, not in the order of the disk: the same on all hosts
    return sorted(found, key=lambda file: file.relative_to(place).as_posix())


def python_files() -> tuple[list[Path], str]:
    """Give the first modules of Python's standard library, about a million bytes, and their name in words.

    They are there wherever Python is, and equal for one version of it.

    Raises:
        DataError: where this Python came without source text.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = (file for file in folder.glob("*.py") if file.stem in sys.stdlib_module_names)
    found, size = [], 0
    for file in sorted(modules, key=lambda file: file.name):
        size += file.stat().st_size
        if size > _OWN_BYTES:
            break
        found.append(file)
    if not found:
        raise DataError(
            f"this Python has no source text in {folder}",
            "Give a text of your own: --set task_options.path=FILE.",
        )
    version = platform.python_version()
    return found, f"Python {version}'s library ({len(found)} modules, {found[0].stem} to {found[-1].stem})"


def check_regular(path: Path) -> int:
    """Check that a path is a file that can be read, and give its size in bytes.

    Raises:
        DataError: where it is missing, a folder, a pipe or a device, which would block or never end.
    """
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            path.open("rb").close()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a file")
    return status.st_size


class MappedFiles:
    """The bytes of files, one after the other, as one long row that stays on disk.

    Each file is mapped when it is first read from. All workers of a host share the pages that the
    kernel keeps; pickling takes the names along, not the bytes.

    Args:
        paths: the files; empty ones are left out.

    Raises:
        DataError: where one cannot be read, or all are empty.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        sizes = {path: check_regular(path) for path in paths}
        self.paths = [path for path in paths if sizes[path]]
        if not self.paths:
            raise DataError(f"{paths[0]} is empty (0 bytes)" if len(paths) == 1 else "all files are empty")
        self.ends = np.cumsum([sizes[path] for path in self.paths], dtype=np.int64)
        self._maps: dict[int, NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def file(self, number: int) -> NDArray[np.uint8]:
        """Give all bytes of one file, as a view of the disk."""
        if number not in self._maps:
            size = self.ends[number] - (self.ends[number - 1] if number else 0)
            try:
                mapped = np.memmap(self.paths[number], np.uint8, "r", shape=(int(size),))
            except (OSError, ValueError) as error:
                raise DataError(f"cannot map {self.paths[number]} into memory: {error}") from None
            self._maps[number] = mapped.view(np.ndarray)
        return self._maps[number]

    def piece(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Give the bytes from ``start`` to before ``stop``; a copy only where they cross files."""
        parts = []
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            first = int(self.ends[number - 1]) if number else 0
            end = min(stop, int(self.ends[number]))
            parts.append(self.file(number)[start - first : end - first])
            start, number = end, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read(self, starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """Give the bytes of windows, (windows, length).

        Args:
            starts: where each begins.
            length: bytes in each.
        """
        if len(self.paths) == 1:
            windows: NDArray[np.uint8] = self.file(0)[starts[:, None] + np.arange(length)]
            return windows
        return np.stack([self.piece(start, start + length) for start in starts.tolist()])
