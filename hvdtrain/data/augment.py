"""Augmentation of images in numpy: crops and flips that depend on each sample's key alone.

Images are (samples, height, width, channels) of any number type. A transform takes a batch of
them and a key of 64 random bits for each; it draws nothing from anywhere else, so a sample is
changed alike whoever computes it, in whichever batch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.datasets import as_dataset, fetch
from hvdtrain.data.order import sample_keys
from hvdtrain.data.resize import Box, centre_box, resize_array
from hvdtrain.errors import DataError
from hvdtrain.task import Arrays

Keys = NDArray[np.uint64]
Transform = Callable[[NDArray[Any], Keys], NDArray[Any]]

_ATTEMPTS = 10  # of a random box to lie inside the image, as torchvision's


def uniform(keys: Keys, draw: int) -> NDArray[np.float64]:
    """Give each sample a number in [0, 1).

    Args:
        keys: the samples' keys.
        draw: which of a sample's numbers; each is independent of the others.
    """
    bits = sample_keys(keys.view(np.int64), 0, draw)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def transform_keys(keys: Keys, place: int) -> Keys:
    """Give the keys for one transform of several, so that no two draw the same numbers.

    Args:
        keys: the samples' keys.
        place: the transform's place among them, from 0.
    """
    return sample_keys(keys.view(np.int64), 1, place)


class Crop:
    """Pads images with zeros and cuts out their own size at a random place.

    Args:
        padding: pixels on each side.
    """

    def __init__(self, padding: int) -> None:
        if padding < 1:
            raise DataError(f"Crop needs a padding of 1 pixel or more, found {padding}")
        self._padding = padding

    def __call__(self, images: NDArray[Any], keys: Keys) -> NDArray[Any]:
        """Crop a batch."""
        _, height, width, _ = _checked(images)
        pad, places = self._padding, 2 * self._padding + 1
        padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
        windows = windows.transpose(0, 1, 2, 4, 5, 3)  # (sample, top, left, height, width, channels)
        top, left = ((uniform(keys, draw) * places).astype(np.int64) for draw in (0, 1))
        result: NDArray[Any] = windows[np.arange(len(images)), top, left]
        return result


class Flip:
    """Mirrors half of the images, left to right."""

    def __call__(self, images: NDArray[Any], keys: Keys) -> NDArray[Any]:
        """Flip a batch."""
        chosen = uniform(keys, 0) < 0.5
        _checked(images)
        result = images.copy()
        result[chosen] = images[chosen, :, ::-1]
        return result


class RandomResizedCrop:
    """Cuts out a random part of random aspect and resizes it to a fixed size.

    The part's area is uniform within ``scale``, its aspect's logarithm within that of ``ratio``
    (C. Szegedy et al., "Going deeper with convolutions", 2015, as torchvision draws it).

    Args:
        size: height and width of the result.
        scale: smallest and largest part of the image's area.
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
        """Crop and resize a batch."""
        count, height, width, channels = _checked(images)
        choose = self.boxes(keys)
        result = np.empty((count, *self.size, channels), images.dtype)
        for place, image in enumerate(images):
            result[place] = resize_array(image, choose(place, width, height), self.size)
        return result

    def boxes(self, keys: Keys) -> Callable[[int, int, int], Box]:
        """Give the function that chooses a sample's part from (place in ``keys``, width, height)."""
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
    """A data set whose images are changed at random when they are trained on.

    Args:
        source: a Dataset, or what :func:`hvdtrain.as_dataset` wraps.
        transforms: what is done to the images, in this order: objects of this module, or any
            function of (images, keys) that gives images.
        name: the key of the images in a sample.
    """

    def __init__(self, source: Any, transforms: Sequence[Transform], name: str = "inputs") -> None:
        self._dataset = as_dataset(source)
        self._transforms = tuple(transforms)
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples as they are."""
        return fetch(self._dataset, indices)

    def augmented(self, indices: NDArray[np.int64], keys: Keys) -> Arrays:
        """Fetch many samples, changed by their keys."""
        arrays = fetch(self._dataset, indices)
        if self._name not in arrays:
            raise DataError(f"Augmented: samples have no {self._name!r}; they have {sorted(arrays)}")
        return {**arrays, self._name: apply(self._transforms, arrays[self._name], keys)}


def apply(
    transforms: Sequence[Transform], images: NDArray[Any], keys: Keys, first_place: int = 0
) -> NDArray[Any]:
    """Change a batch of images by transforms in order, the first of which has this place among all."""
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
