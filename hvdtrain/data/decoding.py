"""What files in tars become: arrays, numbers and text, by the kind that they have."""

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import BadSampleError, DataError

_IMAGES = ("JPEG", "PNG", "WEBP", "BMP", "PPM")
_MOST_PIXELS = 1 << 28
_PICKLES = ("pkl", "pickle", "pyd", "pt", "pth")


def decode_file(kind: str, data: bytes, where: str) -> Any:
    """Return the content of a file of a sample: an array, a number, text, what JSON holds, or its bytes.

    Args:
        kind: what follows the first dot in its name, such as "jpg" or "seg.png".
        data: its bytes.
        where: the sample, for messages.

    Raises:
        BadSampleError: If it cannot be decoded.
        DataError: If it is a pickle: loading one runs what is in it.
    """
    last = kind.rpartition(".")[2]
    if last in _PICKLES:
        raise DataError(
            f"{where} has a file .{kind}: pickles are not loaded, since loading one runs the code in it",
            "Store arrays as .npy, or give decode, a function that makes a sample of the files' bytes.",
        )
    decode = _DECODERS.get(last)
    if decode is None:
        return data
    try:
        return decode(data)
    except Exception as error:
        raise BadSampleError(f"{where}: .{kind} cannot be decoded: {error}") from None


def image(data: bytes) -> NDArray[Any]:
    """Return an image as (height, width, 3), or (height, width, 1) if it is grey.

    Grey images of 16 bits have their values, as int32; others are uint8.

    Raises:
        ValueError: If it is larger than an image can be meant to be.
        OSError: If it is damaged.
    """
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=_IMAGES) as opened:
        if opened.width * opened.height > _MOST_PIXELS:
            raise ValueError(
                f"{opened.width} x {opened.height} pixels: a corrupt file or a decompression bomb"
            )
        is_grey = opened.mode in ("1", "L")
        if opened.mode.startswith("I"):  # "I;16" or "I": convert("L") would clip them
            return np.asarray(opened).astype(np.int32)[:, :, None]
        found = np.asarray(opened.convert("L" if is_grey else "RGB"))
    return found[:, :, None] if is_grey else found


def array(data: bytes) -> NDArray[Any]:
    """Return the array of a .npy file."""
    found: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    return found


def _arrays(data: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as found:
        return dict(found)


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def _integer(data: bytes) -> int:
    return int(data)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "txt": _text,
    "text": _text,
    "transcript": _text,
    "cls": _integer,
    "cls2": _integer,
    "index": _integer,
    "inx": _integer,
    "id": _integer,
    "json": json.loads,
    "npy": array,
    "npz": _arrays,
    "jpg": image,
    "jpeg": image,
    "png": image,
    "webp": image,
    "bmp": image,
    "ppm": image,
}
