"""Sources: where the bytes of images and their labels come from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.resize import Box, Size, centre_box, resize_array
from hvdtrain.errors import DataError

# gives the part of an image to take, from its place in the batch, width and height
ChooseBox = Callable[[int, int, int], Box]

_FEWEST_USED = 0.5  # of the classes that labels span; fewer are a sign of damage


class ImageSource(Protocol):
    """Images of one set with their labels.

    Attributes:
        labels: (images,) of int64.
        size: height and width of the images; None where they differ.
        channels: 1 or 3.
    """

    labels: NDArray[np.int64]
    size: Size | None
    channels: int

    def read(self, indices: NDArray[np.int64], size: Size, choose: ChooseBox | None) -> NDArray[np.uint8]:
        """Give images (len(indices), height, width, channels).

        Args:
            indices: which images.
            size: their height and width; images of another size are resized.
            choose: what part of each to take; the middle if None.
        """
        ...

    def where(self, index: int) -> str:
        """Say where the label of an image lies: file and position."""
        ...


class Pixels(Protocol):
    """Images in an array, whole or in pieces."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(images, height, width) or (images, height, width, channels)."""
        ...

    def __getitem__(self, indices: Any) -> NDArray[np.uint8]:
        """Give some of them."""
        ...


class ArraySource:
    """Images of one size in an array.

    Args:
        pixels: an array of uint8, or what is indexed as one.
        labels: (images,) of int64.
        where: says where a label lies, from its number; a function that can be pickled.
    """

    def __init__(self, pixels: Pixels, labels: NDArray[np.int64], where: Callable[[int], str]) -> None:
        self._pixels = pixels
        self.labels = labels
        self.where = where
        self.size: Size | None = (pixels.shape[1], pixels.shape[2])
        self.channels = pixels.shape[3] if len(pixels.shape) == 4 else 1

    def read(self, indices: NDArray[np.int64], size: Size, choose: ChooseBox | None) -> NDArray[np.uint8]:
        """Give images; as of :class:`ImageSource`."""
        images = self._pixels[indices]
        if images.ndim == 3:
            images = images[..., None]
        height, width = images.shape[1:3]
        if choose is None and (height, width) == size:
            return images
        result = np.empty((len(images), *size, self.channels), np.uint8)
        for place, image in enumerate(images):
            box = choose(place, width, height) if choose else centre_box(width, height, size)
            result[place] = resize_array(image, box, size)
        return result


@dataclass(frozen=True)
class Found:
    """What lies in a place.

    Attributes:
        form: the form of the files in words, such as "IDX files".
        train: the training images, or all.
        evaluation: those to evaluate, where they are apart.
        classes: the number of classes, where the form tells.
    """

    form: str
    train: ImageSource
    evaluation: ImageSource | None = None
    classes: int | None = None


def check_shape(path: Path, where: str, shape: tuple[int, ...]) -> None:
    """Check the shape of an array of images.

    Raises:
        DataError: where it is none, naming file and position.
    """
    said = " x ".join(str(side) for side in shape)
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise DataError(
            f"{path}, {where}: images must be (images, height, width) or (images, height, width, channels) "
            f"with 1 or 3 channels, found {said}"
        )
    if 0 in shape:
        raise DataError(f"{path}, {where}: holds no images ({said})")


def check_counts(images: Path, labels: Path, counts: tuple[int, int]) -> None:
    """Check that there is a label for each image.

    Raises:
        DataError: naming both files.
    """
    if counts[0] != counts[1]:
        raise DataError(f"{images} holds {counts[0]:,} images, and {labels} {counts[1]:,} labels")


def count_classes(source: ImageSource, wanted: int | None) -> int:
    """Give the number of classes that the labels of a source span.

    Args:
        source: the images.
        wanted: the number of classes where it is known.

    Raises:
        DataError: naming the first label that is out of range.
    """
    labels = source.labels
    if wanted:
        outside = np.flatnonzero((labels < 0) | (labels >= wanted))
        if len(outside):
            _refuse(source, int(outside[0]), f"there are {wanted} classes, numbered from 0")
        return wanted
    if labels.min() < 0:
        _refuse(source, int(labels.argmin()), "labels are numbered from 0")
    classes, used = int(labels.max()) + 1, len(np.unique(labels))
    if used < _FEWEST_USED * classes:
        more = f"Where it is right, say how many classes there are: --set task_options.classes={classes}."
        _refuse(source, int(labels.argmax()), f"there are {used} different labels", more)
    return classes


def _refuse(source: ImageSource, index: int, rule: str, remedy: str = "") -> NoReturn:
    label = source.labels[index]
    raise DataError(f"{source.where(index)}: label {label} is out of range; {rule}", remedy)
