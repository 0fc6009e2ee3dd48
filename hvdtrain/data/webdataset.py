"""Tars of WebDataset: read one after the other, or as a data set by an index of where each sample lies."""

import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from tarfile import TarFile, TarInfo
from typing import Any, BinaryIO, Literal, cast
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.indexed import (
    Decode,
    IndexedDataset,
    Paths,
    Records,
    decode_file,
    find_files,
    open_file,
    read_parts,
    version_of,
)
from hvdtrain.errors import DataError
from hvdtrain.storage.files import cache_folder

_AT_ONCE = 8  # tars that are read at the same time
_NO_INDEX = "An index needs tars that are whole and not compressed: decompress them with gunzip."

# the tar, the name of a sample, and kind and member of one of its files -> what a record has of it
_Take = Callable[[TarFile, str, str, TarInfo], Any]


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


def _records(path: str, file: BinaryIO, mode: Literal["r:", "r|*"], take: _Take) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar: their names under "__key__", and what is taken of their files by kind.

    As webdataset has it, a sample's files follow one another and have a name in common.
    """
    record = dict[str, Any]()
    try:
        with tarfile.open(fileobj=file, mode=mode, tarinfo=_Member) as tar:
            for member in tar:
                folder, slash, base = member.name.rpartition("/")
                stem, dot, kind = base.partition(".")
                if member.isreg() and dot and stem:
                    key, kind = f"{folder}{slash}{stem}", kind.lower()
                    if record and record["__key__"] != key:
                        yield record
                        record = {}
                    if kind in record:
                        raise DataError(f"{path}: sample {key} has two files .{kind}")
                    record |= {"__key__": key, kind: take(tar, key, kind, member)}
                tar.members.clear()  # type: ignore[attr-defined]  # it keeps every header otherwise
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        what, remedy = ("an uncompressed tar", _NO_INDEX) if mode == "r:" else ("a tar", "")
        raise DataError(f"{path} cannot be read as {what}: {error}", remedy) from error
    if record:
        yield record


def _contents(path: str, decodes: bool) -> _Take:
    """Return a function that reads a file of a sample."""

    def take(tar: TarFile, key: str, kind: str, member: TarInfo) -> Any:
        data = cast(BinaryIO, tar.extractfile(member)).read()
        return decode_file(kind, data, f"sample {key} of {path}") if decodes else data

    return take


def tar_samples(path: str, decodes: bool) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar, which may be compressed, as it is read."""
    with open_file(path) as file:
        yield from _records(path, file, "r|*", _contents(path, decodes))


# of the samples of a tar: (samples, 2), the byte at which each begins and its end; the kinds of its files
_Index = tuple[NDArray[np.int64], NDArray[np.str_]]


def scan(path: str) -> _Index:
    """Read a tar's headers and return where its samples lie."""
    spans, kinds = [], []
    with open_file(path) as file:
        for record in _records(path, file, "r:", lambda tar, _, __, member: (member.offset, tar.offset)):
            del record["__key__"]
            places = list(record.values())
            spans.append((places[0][0], places[-1][1]))
            kinds.append(" ".join(sorted(record)))
    return np.asarray(spans, np.int64).reshape(-1, 2), np.asarray(kinds, np.str_)


def _indexed(path: str) -> _Index:
    """Return where a tar's samples lie, from the index in the cache folder or a new one."""
    try:
        name = sha256(f"3\n{path}\n{version_of(path)}".encode()).hexdigest()[:40]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    kept = cache_folder() / "tar-index" / f"{name}.npz"
    try:
        with np.load(kept, allow_pickle=False) as found:
            return found["spans"], found["kinds"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        spans, kinds = scan(path)
    partial = kept.with_name(f".{uuid4().hex}.npz")
    with suppress(OSError):  # where none can be kept, each job reads the tar
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(partial, spans=spans, kinds=kinds)
        partial.replace(kept)  # it takes its name when it is whole
    with suppress(OSError):
        partial.unlink()
    return spans, kinds


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
    return IndexedDataset(TarRecords(find_files(paths, ".tar"), decode is None), inputs, targets, decode)


class TarRecords(Records):
    """The samples of tars, by their numbers."""

    def __init__(self, paths: Sequence[str], decodes: bool) -> None:
        self._paths, self._decodes = list(paths), decodes
        begin = os.getpid() % len(paths)  # the workers of a host share the indexing: each begins elsewhere
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = dict(pool.map(lambda path: (path, _indexed(path)), [*paths[begin:], *paths[:begin]]))
        self._spans = [found[path][0] for path in paths]
        super().__init__(map(len, self._spans), f"the first sample of {paths[0]}")
        if decodes:
            self._check_kinds(np.concatenate([found[path][1] for path in paths]))

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples, each with one reading: its files lie one behind the other."""
        parts = []
        for tar, sample in map(self._place, indices):
            first, end = self._spans[tar][sample].tolist()
            parts.append((self._paths[tar], first, end - first))
        return [
            next(_records(path, io.BytesIO(data + bytes(1024)), "r:", _contents(path, self._decodes)))
            for (path, _, _), data in zip(parts, read_parts(parts), strict=True)
        ]

    def _check_kinds(self, kinds: NDArray[np.str_]) -> None:
        """Check that all samples have the same kinds of files: otherwise an epoch would end at a lost one."""
        if (is_odd := kinds != kinds[:1]).any():
            index = int(np.argmax(is_odd))
            self._decodes = False
            key, path = self.read([index])[0]["__key__"], self._paths[self._place(index)[0]]
            raise DataError(
                f"sample {key} of {path} has the files {kinds[index].split()}; the first one has "
                f"{kinds[0].split()}",
                "Complete or remove it, or give decode, which can make samples of either.",
            )
