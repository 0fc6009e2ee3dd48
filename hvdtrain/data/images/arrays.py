"""Images in arrays: IDX files such as those of MNIST, and npz files, in which nothing is unpickled.

IDX (http://yann.lecun.com/exdb/mnist/), plain or gzipped: two zero bytes, the number type, the number of
axes, each axis as 4 bytes in big-endian order; then the numbers.
"""

import gzip
import math
import re
import struct
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from hvdtrain.data.augment import Size, centre_box, resize_array
from hvdtrain.data.images.sources import ChooseBox, Found, reading
from hvdtrain.data.serialization import mapped
from hvdtrain.errors import DataError
from hvdtrain.storage.files import open_regular

_IDX_NAME = re.compile(r"(.*[-_.])?(train|t10k|test)[-_.](images|labels)[-_.]idx\d[-_.]ubyte(\.gz)?")
_UNSIGNED_BYTES = b"\0\0\x08"
_PAIRS = (("x_train", "y_train"), ("images", "labels"), ("train_images", "train_labels"))
_EVAL_PAIRS = (("x_test", "y_test"), ("test_images", "test_labels"))
# exceptions that zipfile raises for damaged archives, in addition to its own
_ZIP_ERRORS = (struct.error, ValueError, OverflowError, RuntimeError)


class ArraySource:
    """Images of equal size, (images, height, width[, channels]), in an array; see :class:`ImageSource`."""

    def __init__(self, path: Path, pixels: NDArray[np.uint8], labels: NDArray[Any], place: str) -> None:
        sides = " x ".join(map(str, pixels.shape))
        if pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[3] not in (1, 3)):
            raise DataError(
                f"{path}: images must be (images, height, width) or (images, height, width, channels) "
                f"with 1 or 3 channels, found {sides}"
            )
        if 0 in pixels.shape:
            raise DataError(f"{path}: contains no images ({sides})")
        if labels.shape != pixels.shape[:1]:
            raise DataError(f"{path}: there are {len(pixels):,} images, and labels of shape {labels.shape}")
        self.labels: NDArray[np.int64] = labels.astype(np.int64)
        self._pixels, self._place = pixels if pixels.ndim == 4 else pixels[..., None], place
        self.size: Size | None = (pixels.shape[1], pixels.shape[2])
        self.channels = self._pixels.shape[3]

    def where(self, index: int) -> str:
        """Return the place of a label."""
        return f"{self._place}, sample {index}"

    def read(self, indices: NDArray[np.int64], size: Size, choose: ChooseBox | None) -> NDArray[np.uint8]:
        """Return images."""
        images = self._pixels[indices]
        height, width = images.shape[1:3]
        if choose is None and (height, width) == size:
            return images
        result = np.empty((len(images), *size, self.channels), np.uint8)
        for place, image in enumerate(images):
            box = choose(place, width, height) if choose else centre_box(width, height, size)
            result[place] = resize_array(image, box, size)
        return result


def idx_names_in(folder: Path) -> list[Path]:
    """Return the files of a folder that have the name of an IDX file."""
    return sorted(path for path in folder.iterdir() if _IDX_NAME.fullmatch(path.name))


def find_idx(folder: Path) -> Found:
    """Open the IDX files of a folder; of a plain and a gzipped one of the same name the plain one."""
    found: dict[tuple[bool, str], dict[str, Path]] = defaultdict(
        dict
    )  # by whether they train, and by content
    for path in reversed(idx_names_in(folder)):
        if match := _IDX_NAME.fullmatch(path.name):
            found[match[2] == "train", match[3]][path.name.removesuffix(".gz")] = path
    for (_, what), files in found.items():
        if len(files) > 1:
            names = ", ".join(sorted(path.name for path in files.values()))
            raise DataError(
                f"{folder} contains more than one file of {what}: {names}", "Keep only one of them."
            )
    sources: list[ArraySource] = []
    for trains in (True, False):
        images, labels = (next(iter(found[trains, what].values()), None) for what in ("images", "labels"))
        if images and labels:
            sources.append(ArraySource(images, read_idx(images, (3, 4)), read_idx(labels, (1,)), str(labels)))
        elif images or labels:
            missing = "labels" if images else "images"
            raise DataError(f"there is no file of {missing} next to {images or labels}")
        elif trains:
            wanted = "train-images-idx3-ubyte or the same with .gz"
            raise DataError(f"{folder} contains no training images: {wanted}")
    return Found("IDX files", sources[0], sources[1] if len(sources) > 1 else None)


def read_idx(path: Path, axes: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read a file of unsigned bytes: mapped into memory, or decompressed if it is gzipped."""
    with reading(path), open_regular(path) as file:
        stream: Any = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        magic = stream.read(4)
        count = magic[3] if len(magic) == 4 and magic[:3] == _UNSIGNED_BYTES else 0
        if count not in axes:
            wanted = " or ".join(f"0x{(_UNSIGNED_BYTES + bytes([number])).hex()}" for number in axes)
            raise DataError(f"{path}, byte 0: the magic number must be {wanted}, found 0x{magic.hex()}")
        header = stream.read(4 * count)
        if len(header) < 4 * count:
            raise DataError(f"{path} is truncated within its header")
        data = np.frombuffer(stream.read(), np.uint8) if path.suffix == ".gz" else None
    shape, offset = tuple(np.frombuffer(header, ">u4").tolist()), 4 + 4 * count
    if data is None:
        data = mapped(path, offset) if path.stat().st_size > offset else np.empty(0, np.uint8)
    if data.size != math.prod(shape):
        raise DataError(
            f"{path} {'is truncated' if data.size < math.prod(shape) else 'does not fit its header'}: the "
            f"header declares {' x '.join(f'{side:,}' for side in shape)} = {math.prod(shape):,} bytes, and "
            f"there are {data.size:,}"
        )
    return data.reshape(shape)


def find_npz(path: Path) -> Found:
    """Open an npz file, whose arrays are read into memory."""
    with reading(path, *_ZIP_ERRORS), open_regular(path) as file, NpzFile(file, own_fid=False) as archive:
        names = set(archive.files)
        train, evaluation = (next(filter(names.issuperset, pairs), None) for pairs in (_PAIRS, _EVAL_PAIRS))
        if train is None:
            raise DataError(
                f"{path} contains no arrays x_train and y_train, or images and labels; "
                f"it has {', '.join(sorted(names)[:20]) or 'none'}"
            )
        read = partial(_read_pair, path, archive)
        return Found("npz file", read(train), read(evaluation) if evaluation else None)


def _read_pair(path: Path, archive: Any, names: tuple[str, str]) -> ArraySource:
    arrays: list[NDArray[Any]] = []
    for name in names:
        try:
            arrays.append(np.asarray(archive[name]))
        # for damaged headers numpy raises many types of exceptions, those of Python's parser among them
        except Exception as error:
            message = str(error).partition("\n")[0][:200] or type(error).__name__
            raise DataError(f"{path}, {name}: cannot be read as an array: {message}") from None
    images, labels = arrays
    if images.dtype != np.uint8:
        raise DataError(
            f"{path}, {names[0]}: images must be uint8 (0 to 255), found {images.dtype}",
            "Convert them before saving, for example (images * 255).astype(numpy.uint8).",
        )
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}, {names[1]}: labels must be whole numbers, found {labels.dtype}")
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    return ArraySource(path / names[0], images, labels, f"{path}, {names[1]}")
