"""Image sources: images of bytes with their labels, whatever the form of the files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.resize import Box, Size, centre_box, resize_array
from hvdtrain.errors import DataError

# returns the box to crop from an image, given its place in the batch, width and height
ChooseBox = Callable[[int, int, int], Box]

_LEAST_USED = 0.5  # fraction of the classes that occur; less is a sign of damage


class ImageSource(Protocol):
    """Images of one set with their labels.

    Attributes:
        labels: (images,) of int64.
        size: height and width of the images; None if they differ.
        channels: 1 or 3.
    """

    labels: NDArray[np.int64]
    size: Size | None
    channels: int

    def read(self, indices: NDArray[np.int64], size: Size, choose: ChooseBox | None) -> NDArray[np.uint8]:
        """Return images (len(indices), height, width, channels).

        Args:
            indices: which images.
            size: their height and width; images of another size are resized.
            choose: the box to crop from each image; if None, the largest centred one.
        """
        ...

    def where(self, index: int) -> str:
        """Return the file and the position in it of an image's label, for messages."""
        ...


class Pixels(Protocol):
    """Images in one or several arrays."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(images, height, width) or (images, height, width, channels)."""
        ...

    def __getitem__(self, indices: Any) -> NDArray[np.uint8]:
        """Return some of the images."""
        ...


class ArraySource:
    """Images of equal size in an array.

    Args:
        pixels: an array of uint8, or an object that is indexed like one.
        labels: (images,) of int64.
        where: returns the file and position of a label by its index; it must be picklable.
    """

    def __init__(self, pixels: Pixels, labels: NDArray[np.int64], where: Callable[[int], str]) -> None:
        self._pixels = pixels
        self.labels = labels
        self.where = where
        self.size: Size | None = (pixels.shape[1], pixels.shape[2])
        self.channels = pixels.shape[3] if len(pixels.shape) == 4 else 1

    def read(self, indices: NDArray[np.int64], size: Size, choose: ChooseBox | None) -> NDArray[np.uint8]:
        """Return images; see :class:`ImageSource`."""
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
    """The images that were found.

    Attributes:
        form: the form of the files, such as "IDX files".
        train: the images for training, or all images.
        evaluation: the images for evaluation, or None if they are not separate.
        classes: the number of classes, or None if the form does not define it.
    """

    form: str
    train: ImageSource
    evaluation: ImageSource | None = None
    classes: int | None = None


def check_shape(path: Path, where: str, shape: tuple[int, ...]) -> None:
    """Check the shape of an array of images.

    Raises:
        DataError: If it is not a shape of images, naming file and position.
    """
    sides = " x ".join(str(side) for side in shape)
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise DataError(
            f"{path}, {where}: images must be (images, height, width) or (images, height, width, channels) "
            f"with 1 or 3 channels, found {sides}"
        )
    if 0 in shape:
        raise DataError(f"{path}, {where}: contains no images ({sides})")


def check_counts(images: Path, labels: Path, counts: tuple[int, int]) -> None:
    """Check that there is a label for each image.

    Raises:
        DataError: If the numbers differ, naming both files.
    """
    if counts[0] != counts[1]:
        raise DataError(f"{images} contains {counts[0]:,} images, but {labels} contains {counts[1]:,} labels")


def count_classes(source: ImageSource, wanted: int | None) -> int:
    """Return the number of classes of a source, by its labels.

    Args:
        source: the images.
        wanted: the number of classes if it is known.

    Raises:
        DataError: If a label is out of range, naming the first one.
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
    if used < _LEAST_USED * classes:
        more = f"If it is correct, set the number of classes: --set task_options.classes={classes}."
        _refuse(source, int(labels.argmax()), f"there are {used} different labels", more)
    return classes


def _refuse(source: ImageSource, index: int, rule: str, remedy: str = "") -> NoReturn:
    label = source.labels[index]
    raise DataError(f"{source.where(index)}: label {label} is out of range; {rule}", remedy)
