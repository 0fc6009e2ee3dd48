"""Image sources: images of bytes with their labels, whatever the form of the files."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.augment import Box, Keys, RandomResizedCrop, Size, Transform, apply, transform_keys
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.task import Arrays

# returns the box to crop from an image, given its place in the batch, width and height
ChooseBox = Callable[[int, int, int], Box]

_LEAST_USED = 0.5  # fraction of the classes that occur; less is a sign of damage


class ImageSource(Protocol):
    """Images of one set with their labels."""

    labels: NDArray[np.int64]  # (images,)
    size: Size | None  # height and width of the images; None if they differ
    channels: int  # 1 or 3

    def read(self, indices: NDArray[np.int64], size: Size, choose: ChooseBox | None) -> NDArray[np.uint8]:
        """Return images, of each the box that ``choose`` returns, or the largest centred one, resized."""

    def where(self, index: int) -> str:
        """Return the file and the position in it of an image's label, for messages."""


@dataclass(frozen=True)
class Found:
    """The images that were found."""

    form: str  # the form of the files, such as "IDX files"
    train: ImageSource  # the images for training, or all images
    evaluation: ImageSource | None = None  # the images for evaluation, or None if they are not separate
    classes: int | None = None  # the number of classes, or None if the form does not define it


def count_classes(source: ImageSource, wanted: int | None) -> int:
    """Return the number of classes of a source, by its labels."""
    labels = source.labels
    classes = wanted or int(labels.max()) + 1
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        _refuse(source, int(outside[0]), f"there are {classes} classes, numbered from 0")
    if wanted:
        return wanted
    used = len(np.unique(labels))
    if used < _LEAST_USED * classes:
        more = f"If it is correct, set the number of classes: --set task_options.classes={classes}."
        _refuse(source, int(labels.argmax()), f"there are {used} different labels", more)
    return classes


def _refuse(source: ImageSource, index: int, rule: str, remedy: str = "") -> NoReturn:
    label = source.labels[index]
    raise DataError(f"{source.where(index)}: label {label} is out of range; {rule}", remedy)


_SAMPLED = 512  # images from which mean and standard deviation are computed


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of bytes: (byte / 255 - mean) / std, for each channel."""

    mean: tuple[float, ...]  # of each channel, in units of 255
    std: tuple[float, ...]  # of each channel, in units of 255; above 0

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the normalised images."""
        scale = 1 / (255 * np.asarray(self.std))
        result = np.multiply(images, scale.astype(np.float32), dtype=np.float32)
        result -= (np.asarray(self.mean) / np.asarray(self.std)).astype(np.float32)
        return result


@dataclass(eq=False)
class ImageData:
    """Images with their labels, a Dataset."""

    _source: ImageSource
    _chosen: NDArray[np.int64] | None  # indices in the source; None for all
    _size: Size
    _normalisation: Normalisation
    _transforms: tuple[Transform, ...] = ()

    def __len__(self) -> int:
        return len(self._source.labels if self._chosen is None else self._chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: array[0] for name, array in self.batch(np.asarray([index])).items()}

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples: inputs (samples, height, width, channels), targets (samples,)."""
        inside = self._inside(indices)
        return self._sample(self._source.read(inside, self._size, None), inside)

    def augmented(self, indices: NDArray[np.int64], keys: Keys) -> Arrays:
        """Fetch many samples, augmented by their keys."""
        inside = self._inside(indices)
        first = self._transforms[0] if self._transforms else None
        if not isinstance(first, RandomResizedCrop):
            images = self._source.read(inside, self._size, None)
            return self._sample(apply(self._transforms, images, keys), inside)
        # the source crops while it decodes
        choose = first.boxes(transform_keys(keys, 0))
        images = self._source.read(inside, first.size, choose)
        return self._sample(apply(self._transforms[1:], images, keys, first_place=1), inside)

    def _inside(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices if self._chosen is None else self._chosen[indices]

    def _sample(self, images: NDArray[np.uint8], inside: NDArray[np.int64]) -> Arrays:
        return {"inputs": self._normalisation(images), "targets": self._source.labels[inside]}


def measure(source: ImageSource, chosen: NDArray[np.int64] | None, size: Size) -> Normalisation:
    """Return the normalisation by evenly spaced images, in integers: the same on every machine."""
    count = len(source.labels if chosen is None else chosen)
    places = np.linspace(0, count - 1, min(_SAMPLED, count)).astype(np.int64)
    pixels, total, squares = 0, np.zeros(source.channels, np.int64), np.zeros(source.channels, np.int64)
    last: BadSampleError | None = None
    for index in places if chosen is None else chosen[places]:
        try:
            values = source.read(np.asarray([index]), size, None).reshape(-1, source.channels)
        except BadSampleError as error:
            last = error
            continue
        wide = values.astype(np.int64)
        pixels += len(wide)
        total += wide.sum(axis=0)
        squares += (wide * wide).sum(axis=0)
    if not pixels:
        raise DataError(f"none of {len(places)} images can be read, the last because {last and last.problem}")
    mean = total / pixels
    variance = np.maximum(squares / pixels - mean**2, 1.0)  # 0 if all images have one colour
    return Normalisation(tuple((mean / 255).tolist()), tuple((np.sqrt(variance) / 255).tolist()))


_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, BadZipFile)


@contextmanager
def reading(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Return a context in which a file is read and errors name it."""
    try:
        yield
    except _ERRORS + more as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DataError(f"{path} cannot be read: {reason}") from None
