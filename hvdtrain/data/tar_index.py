"""An index of a tar file's samples, made by one pass over its headers and kept in a cache folder."""

import json
import os
import tarfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.shard_files import locked, open_file, replacing, version_of
from hvdtrain.data.tar_files import key_and_kind, open_tar
from hvdtrain.errors import DataError
from hvdtrain.paths import cache_folder

_VERSION = 1
_AT_ONCE = 8  # tars that are read at the same time


@dataclass(frozen=True)
class TarIndex:
    """The samples of a tar: files that follow one another and have a name in common.

    Attributes:
        kinds: what follows the common name of files, each once.
        firsts: (samples, kinds), where the content of each file begins in the tar; -1 if there is none.
        sizes: (samples, kinds), its bytes.
        keys: the common names, as UTF-8.
    """

    kinds: tuple[str, ...]
    firsts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    keys: NDArray[np.bytes_]

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, sample: int) -> str:
        """Return the common name of a sample's files."""
        return bytes(self.keys[sample]).decode(errors="replace")

    def members(self, sample: int) -> list[tuple[str, int, int]]:
        """Return kind, first byte and size of each file of a sample."""
        places = zip(self.kinds, self.firsts[sample].tolist(), self.sizes[sample].tolist(), strict=True)
        return [(kind, first, size) for kind, first, size in places if first >= 0]


def indices_of(paths: Sequence[str]) -> list[TarIndex]:
    """Return the samples of tars; those of which the cache folder has no index are read once.

    The workers of a host share them: each begins with another tar, and waits for one that another reads.

    Raises:
        DataError: If a tar is damaged, compressed or no tar.
    """
    folder = cache_folder() / "tar-index"
    begin = os.getpid() % len(paths)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(lambda path: _make(path, folder), [*paths[begin:], *paths[:begin]]))
    return [*found[len(paths) - begin :], *found[: len(paths) - begin]]


def _make(path: str, folder: Path) -> TarIndex:
    """Return a tar's samples, from its index if there is one."""
    try:
        name = sha256(f"{_VERSION}\n{path}\n{version_of(path)}".encode()).hexdigest()[:40]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    kept = folder / f"{name}.npz"
    if (found := _read(kept)) is not None:
        return found
    with locked(kept.with_suffix(".lock")) as is_locked:
        if is_locked and (found := _read(kept)) is not None:
            return found
        index = scan(path)
        if is_locked:
            _write(kept, index)
    return index


def scan(path: str) -> TarIndex:
    """Read a tar's headers and return its samples.

    Raises:
        DataError: If it is damaged, compressed or no tar, or a sample has two files of one kind.
    """
    samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
    try:
        with open_file(path) as file, open_tar(file, "r:") as tar:
            for member in tar:
                if (found := key_and_kind(member)) is None or member.issparse():
                    continue
                key, kind = found
                if not samples or samples[-1][0] != key:
                    samples.append((key, {}))
                if kind in samples[-1][1]:
                    raise DataError(f"{path}: sample {key} has two files .{kind}")
                samples[-1][1][kind] = member.offset_data, member.size
                tar.members.clear()  # type: ignore[attr-defined]  # it keeps every header otherwise
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as an uncompressed tar: {error}",
            "An index needs tars that are whole and not compressed: decompress them with gunzip.",
        ) from None
    kinds = tuple(dict.fromkeys(kind for _, members in samples for kind in members))
    places = np.asarray([[members.get(kind, (-1, 0)) for kind in kinds] for _, members in samples], np.int64)
    places = places.reshape(len(samples), len(kinds), 2)
    keys = np.asarray([key.encode(errors="surrogateescape") for key, _ in samples], np.bytes_)
    return TarIndex(kinds, places[:, :, 0].copy(), places[:, :, 1].copy(), keys)


def _read(kept: Path) -> TarIndex | None:
    """Return what an index holds; None if there is none that can be used."""
    try:
        with np.load(kept, allow_pickle=False) as found:
            kinds = tuple(json.loads(str(found["kinds"])))
            index = TarIndex(kinds, found["firsts"], found["sizes"], found["keys"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    shape = len(index.keys), len(kinds)
    return index if index.firsts.shape == index.sizes.shape == shape else None


def _write(kept: Path, index: TarIndex) -> None:
    """Keep an index; without room or permission, the next job reads the tar again."""
    with suppress(OSError), replacing(kept) as partial, partial.open("wb") as file:
        np.savez(
            file,
            kinds=np.asarray(json.dumps(index.kinds)),
            firsts=index.firsts,
            sizes=index.sizes,
            keys=index.keys,
        )
