"""Tars of WebDataset, read one sample after the other."""

import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.found_files import open_file
from hvdtrain.errors import BadSampleError, DataError

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


def tar_samples(path: str, decodes: bool) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar, which may be compressed: files by kind, and the name under "__key__"."""
    record = dict[str, Any]()
    try:
        with open_file(path) as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=_Member) as tar:
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
                    data = cast(BinaryIO, tar.extractfile(member)).read()
                    found = decode_file(kind, data, f"sample {key} of {path}") if decodes else data
                    record |= {"__key__": key, kind: found}
                tar.members.clear()  # type: ignore[attr-defined]  # it keeps every header otherwise
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as a tar: {error}") from error
    if record:
        yield record
