"""Tars of WebDataset as a data set: an index of each tar makes its samples readable in any order."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.data.decoding import decode_file
from hvdtrain.data.indexed import Decode, Divided, IndexedDataset
from hvdtrain.data.shard_files import Paths, RangeReader, find_files
from hvdtrain.data.tar_index import indices_of
from hvdtrain.errors import DataError


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


class TarRecords(Divided):
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
        members = [self._indices[tar].members(sample) for tar, sample in map(self._place, indices)]
        begins = [min(first for _, first, _ in files) for files in members]
        ends = [max(first + size for _, first, size in files) for files in members]
        paths = [self._paths[self._place(index)[0]] for index in indices]
        parts = [(path, begin, end - begin) for path, begin, end in zip(paths, begins, ends, strict=True)]
        found = zip(indices, members, begins, self._reader.read(parts), strict=True)
        return [self._record(index, files, data, begin) for index, files, begin, data in found]

    def _record(
        self, index: int, members: list[tuple[str, int, int]], data: bytes, begin: int
    ) -> dict[str, Any]:
        tar, sample = self._place(index)
        record: dict[str, Any] = {"__key__": self._indices[tar].key(sample)}
        for kind, first, size in members:
            content = data[first - begin : first - begin + size]
            record[kind] = decode_file(kind, content, self.describe(index)) if self._decodes else content
        return record

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
