"""An image folder: a sub-folder per class, images decoded with Pillow when they are read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data.augment import Size, centre_box, resize_image
from hvdtrain.data.images.sources import ChooseBox, Found, reading
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.storage.files import open_regular

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")  # some of Pillow's other formats run programs
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}  # with 8 bits per channel
_GREY = {"1", "L", "LA"}
_EVAL_NAMES = ("val", "validation", "valid", "test")
_PROBED = 64  # images whose headers decide size and channels of all


class FolderSource:
    """Images in files."""

    def __init__(self, root: Path, names: list[str], labels: NDArray[np.int64]) -> None:
        self._root, self.labels = root, labels
        self._names = np.asarray([os.fsencode(name) for name in names])  # less memory than objects
        self.size, self.channels = self._probe()

    def where(self, index: int) -> str:
        """Return the path of an image."""
        return str(self._path(index))

    def _path(self, index: int) -> Path:
        return self._root / os.fsdecode(bytes(self._names[index]))

    def read(self, indices: NDArray[np.int64], size: Size, choose: ChooseBox | None) -> NDArray[np.uint8]:
        """Return images."""
        result = np.empty((len(indices), *size, self.channels), np.uint8)
        for place, index in enumerate(indices.tolist()):
            with _opened(self._path(index)) as image:
                pixels = np.asarray(self._decode(image, place, size, choose))
            result[place] = pixels.reshape(result.shape[1:])
        return result

    def _decode(self, image: Image.Image, place: int, size: Size, choose: ChooseBox | None) -> Image.Image:
        width, height = image.size
        box = choose(place, width, height) if choose else centre_box(width, height, size)
        shrink = min((box[2] - box[0]) / size[1], (box[3] - box[1]) / size[0])
        if shrink >= 2:
            # decoding a JPEG at 1/2, 1/4 or 1/8 of its size is much faster
            image.draft(None, (int(width / shrink), int(height / shrink)))
        scale_x, scale_y = image.width / width, image.height / height
        box = (box[0] * scale_x, box[1] * scale_y, box[2] * scale_x, box[3] * scale_y)
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")  # converting to RGB in one step makes Pillow warn
        converted = image.convert("L" if self.channels == 1 else "RGB")
        return resize_image(converted, box, size)

    def _probe(self) -> tuple[Size | None, int]:
        """Return size and channels by the headers of some images, without those that cannot be read."""
        sizes, modes = set(), set()
        chosen = np.linspace(0, len(self._names) - 1, min(_PROBED, len(self._names))).astype(int)
        for index in chosen.tolist():
            try:
                with _opened(self._path(index)) as image:
                    sizes.add((image.height, image.width))
                    modes.add(image.mode)
            except BadSampleError as error:
                last = error
        if not sizes:
            raise DataError(f"none of {len(chosen)} images can be read, the last because {last.problem}")
        return sizes.pop() if len(sizes) == 1 else None, 1 if modes <= _GREY else 3


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Return a context with an image whose header has been read."""
    try:
        with open_regular(path) as file, Image.open(file, formats=_FORMATS) as image:
            if image.mode not in _MODES:
                raise BadSampleError(
                    f"{path} cannot be read: its pixels are {image.mode}; only 8-bit images are supported"
                )
            yield image
    except (BadSampleError, MemoryError):
        raise
    # for damaged files Pillow raises many types of exceptions, SyntaxError and struct.error among them
    except Exception as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        reason = "not an image of a supported format" if "cannot identify" in reason else reason
        raise BadSampleError(f"{path} cannot be read: {reason}") from None


def find(path: Path) -> Found:
    """Open an image folder: its train/ and val/ or test/ if it has them, otherwise all of it."""
    train = path / "train"
    if not train.is_dir():
        source, classes = _open_part(path)
        return Found("image folder", source, None, len(classes))
    apart = next((path / name for name in _EVAL_NAMES if (path / name).is_dir()), None)
    source, classes = _open_part(train)
    evaluation = _open_part(apart, classes)[0] if apart else None
    if evaluation:
        evaluation.channels = source.channels
    return Found("image folder", source, evaluation, len(classes))


def _open_part(folder: Path, known: tuple[str, ...] = ()) -> tuple[FolderSource, tuple[str, ...]]:
    classes = folders_in(folder)
    if not classes:
        raise DataError(f"{folder} has no sub-folders; it needs one for each class of images")
    strange = [name for name in classes if known and name not in known]
    if strange:
        raise DataError(f"{folder / strange[0]}: the training images have no class {strange[0]!r}")
    names: list[str] = []
    labels: list[NDArray[np.int64]] = []
    for name in classes:
        found = _images_in(folder, name)
        if not found:
            raise DataError(f"{folder / name} contains no images ({', '.join(sorted(SUFFIXES))})")
        names += found
        labels.append(np.full(len(found), (known or classes).index(name), np.int64))
    return FolderSource(folder, names, np.concatenate(labels)), classes


def folders_in(folder: Path) -> tuple[str, ...]:
    """Return the sub-folders, which can be classes."""
    with reading(folder):
        return tuple(sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith(".")))


def _images_in(root: Path, name: str) -> list[str]:
    """Return the images in the folder of a class, as sorted paths relative to the root."""

    def refuse(error: OSError) -> None:
        raise error

    with reading(root / name):
        walked = [
            os.path.join(os.path.relpath(place, root), file)
            for place, _, files in os.walk(root / name, onerror=refuse)
            for file in files
        ]
    suffix_of = {file: os.path.splitext(file)[1].lower() for file in walked}
    return sorted(
        file for file in walked if suffix_of[file] in SUFFIXES and not os.path.basename(file).startswith(".")
    )
