"""Augmentation of images in numpy: crops and flips that depend on each sample's key alone.

Images are (samples, height, width, channels) of any number type. A transform takes a batch of
images and a key of 64 random bits for each. It has no other source of randomness, so the result
for a sample does not depend on its batch or on the worker that computes it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.blocks import blocks_of
from hvdtrain.data.datasets import as_dataset, fetch
from hvdtrain.data.order import sample_keys
from hvdtrain.data.resize import Box, centre_box, resize_array
from hvdtrain.data.stream import Stream
from hvdtrain.errors import DataError
from hvdtrain.task import Arrays

Keys = NDArray[np.uint64]
Transform = Callable[[NDArray[Any], Keys], NDArray[Any]]

_ATTEMPTS = 10  # to find a random box inside the image, as in torchvision


def uniform(keys: Keys, draw: int) -> NDArray[np.float64]:
    """Return a random number in [0, 1) for each sample.

    Args:
        keys: the samples' keys.
        draw: which of a sample's random numbers; they are independent of each other.
    """
    bits = sample_keys(keys.view(np.int64), 0, draw)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def transform_keys(keys: Keys, place: int) -> Keys:
    """Return the keys for one of several transforms, so that no two use the same random numbers.

    Args:
        keys: the samples' keys.
        place: position of the transform among them, from 0.
    """
    return sample_keys(keys.view(np.int64), 1, place)


class Crop:
    """Pads images with zeros and crops them to their own size at a random place.

    Args:
        padding: pixels on each side.
    """

    def __init__(self, padding: int) -> None:
        if padding < 1:
            raise DataError(f"Crop needs a padding of 1 pixel or more, found {padding}")
        self._padding = padding

    def __call__(self, images: NDArray[Any], keys: Keys) -> NDArray[Any]:
        """Return the cropped images."""
        _, height, width, _ = _checked(images)
        pad, places = self._padding, 2 * self._padding + 1
        padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
        windows = windows.transpose(0, 1, 2, 4, 5, 3)  # (sample, top, left, height, width, channels)
        top, left = ((uniform(keys, draw) * places).astype(np.int64) for draw in (0, 1))
        result: NDArray[Any] = windows[np.arange(len(images)), top, left]
        return result


class Flip:
    """Flips half of the images from left to right."""

    def __call__(self, images: NDArray[Any], keys: Keys) -> NDArray[Any]:
        """Return the images, half of them flipped."""
        chosen = uniform(keys, 0) < 0.5
        _checked(images)
        result = images.copy()
        result[chosen] = images[chosen, :, ::-1]
        return result


class RandomResizedCrop:
    """Crops a part of random area and aspect ratio and resizes it to a fixed size.

    The area is uniform within ``scale``, and the logarithm of the aspect ratio is uniform within that
    of ``ratio`` (C. Szegedy et al., "Going deeper with convolutions", 2015, as in torchvision).

    Args:
        size: height and width of the result.
        scale: smallest and largest fraction of the image's area.
        ratio: smallest and largest width / height.
    """

    def __init__(
        self,
        size: tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        if not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
            raise DataError(f"RandomResizedCrop cannot use scale {scale} and ratio {ratio}")
        self.size = size
        self._scale = scale
        self._ratio = ratio

    def __call__(self, images: NDArray[Any], keys: Keys) -> NDArray[Any]:
        """Return the images, cropped and resized."""
        count, height, width, channels = _checked(images)
        choose = self.boxes(keys)
        result = np.empty((count, *self.size, channels), images.dtype)
        for place, image in enumerate(images):
            result[place] = resize_array(image, choose(place, width, height), self.size)
        return result

    def boxes(self, keys: Keys) -> Callable[[int, int, int], Box]:
        """Return a function of (place in ``keys``, width, height) that gives a sample's box."""
        draws = np.stack([uniform(keys, draw) for draw in range(4 * _ATTEMPTS)], axis=1)
        low, high = (math.log(limit) for limit in self._ratio)

        def choose(place: int, width: int, height: int) -> Box:
            for area, aspect, left, top in draws[place].reshape(_ATTEMPTS, 4).tolist():
                target = width * height * (self._scale[0] + area * (self._scale[1] - self._scale[0]))
                ratio = math.exp(low + aspect * (high - low))
                w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
                if 0 < w <= width and 0 < h <= height:
                    x, y = int(left * (width - w + 1)), int(top * (height - h + 1))
                    return x, y, x + w, y + h
            return centre_box(width, height, self.size)

        return choose


class Augmented:
    """A data set whose images are augmented in training.

    Args:
        source: a Dataset, or what :func:`hvdtrain.as_dataset` wraps.
        transforms: the transforms in their order: objects of this module, or any function of
            (images, keys) that returns images.
        name: the key of the images in a sample.
    """

    def __init__(self, source: Any, transforms: Sequence[Transform], name: str = "inputs") -> None:
        self._dataset = as_dataset(source)
        if isinstance(self._dataset, Stream):
            raise DataError(
                "Augmented needs data with an index, and found a stream",
                "Augment in hvdtrain.stream(..., decode=...).",
            )
        self.blocks = blocks_of(self._dataset)
        self._transforms = tuple(transforms)
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples without augmentation."""
        return fetch(self._dataset, indices)

    def augmented(self, indices: NDArray[np.int64], keys: Keys) -> Arrays:
        """Fetch many samples, augmented by their keys."""
        arrays = fetch(self._dataset, indices)
        if self._name not in arrays:
            raise DataError(f"Augmented: samples have no {self._name!r}; they have {sorted(arrays)}")
        return {**arrays, self._name: apply(self._transforms, arrays[self._name], keys)}


def apply(
    transforms: Sequence[Transform], images: NDArray[Any], keys: Keys, first_place: int = 0
) -> NDArray[Any]:
    """Return images after all transforms in order, the first of which is at ``first_place``."""
    for place, transform in enumerate(transforms, first_place):
        images = transform(images, transform_keys(keys, place))
    return images


def _checked(images: NDArray[Any]) -> tuple[int, int, int, int]:
    if images.ndim != 4:
        raise DataError(
            f"augmentation takes images (samples, height, width, channels), found shape {images.shape}"
        )
    count, height, width, channels = images.shape
    return count, height, width, channels
