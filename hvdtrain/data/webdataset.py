"""Tars of WebDataset as a data set: an index of each tar makes its samples readable in any order."""

import fcntl
import json
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tarfile import TarFile, TarInfo
from typing import Any, BinaryIO, Literal, cast
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.indexed import Decode, IndexedDataset, Records, decode_file
from hvdtrain.data.shard_files import Paths, RangeReader, find_files, open_file, version_of
from hvdtrain.errors import DataError
from hvdtrain.storage.files import cache_folder


class _Member(tarfile.TarInfo):
    """A member whose header is whole."""

    @classmethod
    def fromtarfile(cls, tar: Any) -> Any:
        """Return the next member.

        Raises:
            ReadError: If its header is damaged, or the file ends without the mark of a tar's end.
        """
        at = tar.offset
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise  # the mark of the end; tarfile takes every other one for the end, too
            raise tarfile.ReadError(f"no header at byte {at:,}: {error}") from None


def _files(path: str, mode: Literal["r:", "r|*"]) -> Iterator[tuple[TarFile, str, str, TarInfo]]:
    """Yield a tar, the name of a sample, the kind of one of its files, and the member, of each file.

    As webdataset has it, a sample's files follow one another and have a name in common, and their kind
    follows its first dot.

    Raises:
        DataError: If a sample has two files of one kind.
        TarError, EOFError, OSError, zlib.error: If the tar is damaged or cut.
    """
    key, kinds = "", set[str]()
    with open_file(path) as file, tarfile.open(fileobj=file, mode=mode, tarinfo=_Member) as tar:
        for member in tar:
            folder, slash, base = member.name.rpartition("/")
            stem, dot, kind = base.partition(".")
            if member.isreg() and dot and stem:
                if key != (key := f"{folder}{slash}{stem}"):
                    kinds.clear()
                if (kind := kind.lower()) in kinds:
                    raise DataError(f"{path}: sample {key} has two files .{kind}")
                kinds.add(kind)
                yield tar, key, kind, member
            tar.members.clear()  # type: ignore[attr-defined]  # it keeps every header otherwise


def tar_samples(path: str, decodes: bool) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar, which may be compressed, as it is read.

    Raises:
        DataError: If it is damaged or cut, or a sample has two files of one kind.
    """
    record = dict[str, Any]()
    try:
        for tar, key, kind, member in _files(path, "r|*"):
            if record and record["__key__"] != key:
                yield record
                record = {}
            record["__key__"] = key
            data = cast(BinaryIO, tar.extractfile(member)).read()
            record[kind] = decode_file(kind, data, f"sample {key} of {path}") if decodes else data
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as a tar: {error}") from error
    if record:
        yield record


_VERSION = 1
_AT_ONCE = 8  # tars that are read at the same time


@dataclass(frozen=True)
class TarIndex:
    """The samples of a tar: files that follow one another and have a name in common."""

    kinds: tuple[str, ...]  # what follows the common name of files, each once
    # (samples, kinds), where the content of each file begins in the tar; -1 if there is none
    firsts: NDArray[np.int64]
    sizes: NDArray[np.int64]  # (samples, kinds), its bytes
    keys: NDArray[np.bytes_]  # the common names, as UTF-8

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
    """Return a tar's samples, from its index if there is one; where none can be kept, the tar is read."""
    try:
        name = sha256(f"{_VERSION}\n{path}\n{version_of(path)}".encode()).hexdigest()[:40]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    kept = folder / f"{name}.npz"
    if (found := _read(kept)) is None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with kept.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if (found := _read(kept)) is None:
                    found = scan(path)
                    _write(kept, found)
    return scan(path) if found is None else found


def scan(path: str) -> TarIndex:
    """Read a tar's headers and return its samples.

    Raises:
        DataError: If it is damaged, compressed or no tar, or a sample has two files of one kind.
    """
    samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
    try:
        for _, key, kind, member in _files(path, "r:"):
            if member.issparse():
                continue
            if not samples or samples[-1][0] != key:
                samples.append((key, {}))
            samples[-1][1][kind] = member.offset_data, member.size
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
    """Keep an index, which takes its name when it is whole; raises an OSError if it cannot."""
    partial = kept.with_name(f".{uuid4().hex}.npz")
    try:
        kinds = np.asarray(json.dumps(index.kinds))
        np.savez(partial, kinds=kinds, firsts=index.firsts, sizes=index.sizes, keys=index.keys)
        partial.replace(kept)
    finally:
        partial.unlink(missing_ok=True)


def open_webdataset(
    paths: Paths,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    *,
    decode: Decode | None = None,
) -> IndexedDataset:
    """Return the samples of WebDataset's tars as a data set.

    The first job that opens a tar passes over its headers once and keeps an index in the cache folder.

    Args:
        paths: tars, folders, patterns such as ``train-{000..127}.tar``, or URLs; see docs/streams.md.
        inputs: the kind of file that the model is given, such as "jpg", or several.
        targets: the kind of file that the loss compares with, such as "cls".
        decode: a function that makes a sample of a dict from kind to the file's bytes, with its name under
            "__key__". Without it, files are decoded by their kind, and what holds no numbers is left out.

    Raises:
        DataError: If the tars cannot be used.
    """
    records = TarRecords(find_files(paths, ".tar"), decodes=decode is None)
    return IndexedDataset(records, inputs, targets, decode)


class TarRecords(Records):
    """The samples of tars, by their numbers.

    Args:
        paths: the tars.
        decodes: whether files are decoded by their kind.
    """

    def __init__(self, paths: Sequence[str], decodes: bool) -> None:
        self._paths = list(paths)
        self._indices = indices_of(self._paths)
        super().__init__(map(len, self._indices))
        self._decodes = decodes
        self._reader = RangeReader()
        if decodes:
            self._check_kinds()

    def describe(self, index: int) -> str:
        """Return where a sample lies."""
        tar, sample = self._place(index)
        return f"sample {self._indices[tar].key(sample)} of {self._paths[tar]}"

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples, each with one reading: its files lie one behind the other."""
        places = [self._place(index) for index in indices]
        members = [self._indices[tar].members(sample) for tar, sample in places]
        begins = [min(first for _, first, _ in files) for files in members]
        sizes = [max(first + size for _, first, size in files) for files in members] - np.asarray(begins)
        paths = [self._paths[tar] for tar, _ in places]
        found = self._reader.read([*zip(paths, begins, sizes.tolist(), strict=True)])
        records = []
        for index, (tar, sample), files, begin, data in zip(
            indices, places, members, begins, found, strict=True
        ):
            record: dict[str, Any] = {"__key__": self._indices[tar].key(sample)}
            for kind, first, size in files:
                content = data[first - begin : first - begin + size]
                record[kind] = decode_file(kind, content, self.describe(index)) if self._decodes else content
            records.append(record)
        return records

    def _check_kinds(self) -> None:
        """Check that all samples have the same kinds of files: otherwise an epoch would end at a lost one."""
        kinds = next((set(index.kinds) for index in self._indices if len(index)), set())
        for path, index in zip(self._paths, self._indices, strict=True):
            is_odd = (index.firsts < 0).any(axis=1) | (set(index.kinds) != kinds)
            if is_odd.any():
                sample = int(np.argmax(is_odd))
                found = sorted(kind for kind, _, _ in index.members(sample))
                raise DataError(
                    f"sample {index.key(sample)} of {path} has the files {found}; others have "
                    f"{sorted(kinds | set(index.kinds))}",
                    "Complete or remove it, or give decode, which can make samples of either.",
                )
