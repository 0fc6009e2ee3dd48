"""Tars of WebDataset as a data set: an index of each tar makes its samples readable in any order."""

import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from tarfile import TarFile, TarInfo
from typing import Any, BinaryIO, Literal, cast
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.indexed import Decode, IndexedDataset, Records, decode_file
from hvdtrain.data.shard_files import Paths, find_files, open_file, read_parts, version_of
from hvdtrain.errors import DataError
from hvdtrain.storage.files import cache_folder


class _Member(tarfile.TarInfo):
    """A member whose header is whole."""

    @classmethod
    def fromtarfile(cls, tar: Any) -> Any:
        """Return the next member."""
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
    """Yield the samples of a tar, which may be compressed, as it is read."""
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


_AT_ONCE = 8  # tars that are read at the same time


@dataclass(frozen=True)
class TarIndex:
    """The samples of a tar: files that follow one another and have a name in common."""

    kinds: NDArray[np.str_]  # what follows the common name of files, each once
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
        columns = self.kinds.tolist(), self.firsts[sample].tolist(), self.sizes[sample].tolist()
        return [member for member in zip(*columns, strict=True) if member[1] >= 0]


def indices_of(paths: Sequence[str]) -> list[TarIndex]:
    """Return the samples of tars; those of which the cache folder has no index are read once.

    The workers of a host share them: each begins with another tar.
    """
    begin = os.getpid() % len(paths)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(_indexed, [*paths[begin:], *paths[:begin]]))
    return [*found[len(paths) - begin :], *found[: len(paths) - begin]]


def _indexed(path: str) -> TarIndex:
    """Return a tar's samples, from its index if there is one that can be used; otherwise one is kept."""
    try:
        name = sha256(f"2\n{path}\n{version_of(path)}".encode()).hexdigest()[:40]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    kept = cache_folder() / "tar-index" / f"{name}.npz"
    try:
        with np.load(kept, allow_pickle=False) as found:
            return TarIndex(**found)
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
        index = scan(path)
    partial = kept.with_name(f".{uuid4().hex}.npz")
    with suppress(OSError):  # where none can be kept, each job reads the tar
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(partial, **vars(index))
        partial.replace(kept)  # it takes its name when it is whole
    with suppress(OSError):
        partial.unlink(missing_ok=True)
    return index


def scan(path: str) -> TarIndex:
    """Read a tar's headers and return its samples."""
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
    kinds = list(dict.fromkeys(kind for _, members in samples for kind in members))
    places = np.asarray([[members.get(kind, (-1, 0)) for kind in kinds] for _, members in samples], np.int64)
    places = places.reshape(len(samples), len(kinds), 2)
    keys = np.asarray([key.encode(errors="surrogateescape") for key, _ in samples], np.bytes_)
    return TarIndex(np.asarray(kinds, np.str_), places[:, :, 0], places[:, :, 1], keys)


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
    """The samples of tars, by their numbers."""

    def __init__(self, paths: Sequence[str], decodes: bool) -> None:
        self._paths = list(paths)
        self._indices = indices_of(self._paths)
        super().__init__(map(len, self._indices))
        self._decodes = decodes
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
        parts = []
        for (tar, _), files in zip(places, members, strict=True):
            begin = min(first for _, first, _ in files)
            parts.append((self._paths[tar], begin, max(first + size for _, first, size in files) - begin))
        records = []
        for place, data in enumerate(read_parts(parts)):
            (tar, sample), where = places[place], self.describe(indices[place])
            record: dict[str, Any] = {"__key__": self._indices[tar].key(sample)}
            for kind, first, size in members[place]:
                content = data[first - parts[place][1] :][:size]
                record[kind] = decode_file(kind, content, where) if self._decodes else content
            records.append(record)
        return records

    def _check_kinds(self) -> None:
        """Check that all samples have the same kinds of files: otherwise an epoch would end at a lost one."""
        kinds = next((set(index.kinds.tolist()) for index in self._indices if len(index)), set())
        for path, index in zip(self._paths, self._indices, strict=True):
            is_odd = (index.firsts < 0).any(axis=1) | (set(index.kinds.tolist()) != kinds)
            if is_odd.any():
                sample = int(np.argmax(is_odd))
                found = sorted(kind for kind, _, _ in index.members(sample))
                raise DataError(
                    f"sample {index.key(sample)} of {path} has the files {found}; others have "
                    f"{sorted(kinds | set(index.kinds.tolist()))}",
                    "Complete or remove it, or give decode, which can make samples of either.",
                )
