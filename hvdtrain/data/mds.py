"""MosaicML's MDS shards as a data set: a reader of the format, uncompressed or with zstd."""

import io
import json
import os
import posixpath
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.decoding import image
from hvdtrain.data.indexed import Decode, Divided, IndexedDataset
from hvdtrain.data.shard_files import RangeReader, locked, open_file, replacing, size_of, version_of
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.object_urls import is_url
from hvdtrain.paths import cache_folder

_SCALARS = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
)
# of arrays whose type or shape stands before their values
_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_LENGTH = np.dtype("<u4")


def open_mds(
    path: str | Path,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    *,
    decode: Decode | None = None,
) -> IndexedDataset:
    """Return the samples of a folder of MDS shards, with its ``index.json``, as a data set.

    Shards that are compressed with zstd are decompressed once into the cache folder.

    Args:
        path: the folder, or its URL.
        inputs: the column that the model is given, or several.
        targets: the column that the loss compares with.
        decode: a function that makes a sample of a record, a dict. Without it, columns of numbers and images
            are used and others left out.

    Raises:
        DataError: If the folder cannot be used.
    """
    return IndexedDataset(MdsRecords(str(path)), inputs, targets, decode)


@dataclass(frozen=True)
class _Shard:
    """A shard: its file, its size, how many samples it has, and its columns with encodings and sizes."""

    path: str
    size: int
    samples: int
    columns: tuple[tuple[str, str, int | None], ...]


class MdsRecords(Divided):
    """The samples of MDS shards, by their numbers.

    Args:
        folder: the folder, or its URL.
    """

    def __init__(self, folder: str) -> None:
        if not is_url(folder):
            folder = os.path.abspath(os.path.expanduser(folder))
        index = posixpath.join(folder, "index.json")
        try:
            with open_file(index) as file:
                content = json.load(file)
            found = [(_shard(folder, one), _packed(folder, one)) for one in content["shards"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index} cannot be read as the index of MDS shards: {error!r}") from None
        self._shards = [_unpacked(packed, shard) for shard, packed in found if shard.samples]
        super().__init__(shard.samples for shard in self._shards)
        self._reader = RangeReader()

    def describe(self, index: int) -> str:
        """Return where a sample lies."""
        shard, sample = self._shard_of(index)
        return f"sample {sample} of {shard.path}"

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples: first where they begin and end is read, then they are."""
        places = [self._shard_of(index) for index in indices]
        ends = self._reader.read([(shard.path, 4 * (1 + sample), 8) for shard, sample in places])
        spans = [tuple(np.frombuffer(end, _LENGTH).tolist()) for end in ends]
        for index, (shard, _), (first, last) in zip(indices, places, spans, strict=True):
            if not 4 * (shard.samples + 2) <= first <= last <= shard.size:
                raise DataError(f"{self.describe(index)}: its place, {first} to {last}, is not in the shard")
        parts = [
            (shard.path, first, last - first) for (shard, _), (first, last) in zip(places, spans, strict=True)
        ]
        found = zip(indices, places, self._reader.read(parts), strict=True)
        return [self._record(index, shard, data) for index, (shard, _), data in found]

    def _record(self, index: int, shard: _Shard, data: bytes) -> dict[str, Any]:
        sizes, at = [], 0
        for _, _, fixed in shard.columns:
            sizes.append(int(np.frombuffer(data, _LENGTH, 1, at)[0]) if fixed is None else fixed)
            at += 4 if fixed is None else 0
        if at + sum(sizes) != len(data):
            raise DataError(
                f"{self.describe(index)} has {len(data)} bytes; its columns have {at + sum(sizes)}"
            )
        record = {}
        for (name, encoding, _), size in zip(shard.columns, sizes, strict=True):
            try:
                record[name] = _decoder(encoding)(data[at : at + size])
            except Exception as error:
                raise BadSampleError(f"{self.describe(index)}: {name} cannot be decoded: {error}") from None
            at += size
        return record

    def _shard_of(self, index: int) -> tuple[_Shard, int]:
        shard, sample = self._place(index)
        return self._shards[shard], sample


def _shard(folder: str, one: Mapping[str, Any]) -> _Shard:
    """Return a shard of an index.

    Raises:
        DataError: If it is of another format, or a column has an encoding that is not read.
    """
    raw = one["raw_data"]
    path = _inside(folder, raw)
    if one["format"] != "mds":
        raise DataError(f"{path} has the format {one['format']!r}; MDS is read", "Convert it with MDSWriter.")
    if one.get("compression") and str(one["compression"]).partition(":")[0] != "zstd":
        raise DataError(
            f"{path} is compressed with {one['compression']}; zstd and no compression are read",
            "Write the shards with MDSWriter(compression='zstd') or without compression.",
        )
    columns = tuple(zip(one["column_names"], one["column_encodings"], one["column_sizes"], strict=True))
    for column, encoding, _ in columns:
        try:
            _decoder(str(encoding))
        except KeyError:
            kind = (
                "pickles are not loaded, since loading one runs the code in it"
                if encoding == "pkl"
                else "unknown"
            )
            raise DataError(f"{path}: column {column!r} has the encoding {encoding!r}: {kind}") from None
    return _Shard(path, int(raw["bytes"]), int(one["samples"]), columns)


def _inside(folder: str, one: Mapping[str, Any]) -> str:
    """Return where a file that an index names lies.

    Raises:
        DataError: If it is outside the index's folder.
    """
    name = str(one["basename"])
    path = posixpath.join(folder, name)
    if posixpath.isabs(name) or ".." in name.split("/"):
        raise DataError(f"{path}: the index names a file outside its folder")
    return path


def _of_its_size(shard: _Shard) -> _Shard:
    """Return a shard whose file is as long as the index says.

    Raises:
        DataError: If it is not there, or has another size.
    """
    try:
        size = size_of(shard.path)
    except OSError as error:
        raise DataError(f"{shard.path} cannot be read: {error}") from None
    if size != shard.size:
        raise DataError(f"{shard.path} has {size:,} bytes; its index says {shard.size:,}")
    return shard


def _packed(folder: str, one: Mapping[str, Any]) -> str:
    """Return where the compressed file of a shard lies; empty if it is not compressed."""
    return _inside(folder, one["zip_data"]) if one.get("compression") else ""


def _unpacked(packed: str, shard: _Shard) -> _Shard:
    """Return a shard that can be read in parts; a compressed one lies in the cache folder then."""
    if not packed:
        return _of_its_size(shard)
    try:
        name = sha256(f"{packed}\n{version_of(packed)}".encode()).hexdigest()[:40]
        place = cache_folder() / "mds" / f"{name}.mds"
        with locked(place.with_suffix(".lock")):
            if not place.exists() or place.stat().st_size != shard.size:
                _unpack(packed, place, shard.size)
    except OSError as error:
        raise DataError(
            f"{packed} cannot be decompressed into {cache_folder()}: {error}",
            "HVDTRAIN_CACHE names another folder.",
        ) from None
    return _Shard(str(place), shard.size, shard.samples, shard.columns)


def _unpack(packed: str, place: Path, size: int) -> None:
    """Decompress a shard.

    Raises:
        DataError: If pyarrow is not installed, or the shard is damaged.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise DataError(f"{packed} needs pyarrow", "pip install 'hvdtrain[parquet]'") from None
    with replacing(place) as partial:
        with open_file(packed) as file, partial.open("wb") as out:
            shutil.copyfileobj(pa.CompressedInputStream(pa.PythonFile(file), "zstd"), out)
        if partial.stat().st_size != size:
            raise DataError(
                f"{packed} has {partial.stat().st_size:,} bytes when decompressed; its index says {size:,}"
            )


def _decoder(encoding: str) -> Callable[[bytes], Any]:
    """Return what decodes a column.

    Raises:
        KeyError: If the encoding is not known.
    """
    kind, _, given = encoding.partition(":")
    if kind == "ndarray":
        return lambda data: _array(data, *given.split(":")) if given else _array(data)
    if kind in _SCALARS:
        return lambda data: np.frombuffer(data, np.dtype(kind).newbyteorder("<"))[0]
    return _DECODERS[kind]


def _array(data: bytes, dtype: str = "", shape: str = "") -> NDArray[Any]:
    """Return an array; its type and shape stand in its column's encoding or before its values."""
    at = 0
    if not dtype:
        dtype, at = _DTYPES[data[0]], 1
    if shape:
        sizes = tuple(map(int, shape.split(",")))
    else:
        axes, bytes_each = data[at] >> 2, 1 << (data[at] & 3)
        sizes = tuple(np.frombuffer(data, f"<u{bytes_each}", axes, at + 1).tolist())
        at += 1 + axes * bytes_each
    values: NDArray[Any] = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=at).reshape(sizes)
    return values


def _raw_image(data: bytes) -> NDArray[Any]:
    """Return an image of Pillow's raw pixels: width, height, length of the mode, mode, pixels."""
    from PIL import Image

    width, height, length = np.frombuffer(data, _LENGTH, 3).tolist()
    mode = data[12 : 12 + length].decode()
    found = np.asarray(Image.frombytes(mode, (width, height), data[12 + length :]))
    return found[:, :, None] if found.ndim == 2 else found


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": lambda data: data,
    "str": lambda data: data.decode("utf-8"),
    "int": lambda data: int(np.frombuffer(data, "<i8")[0]),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: float(data.decode()),
    "json": lambda data: json.load(io.BytesIO(data)),
    "jpeg": image,
    "png": image,
    "pil": _raw_image,
}
