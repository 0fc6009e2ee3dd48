"""Augmentation of images in numpy: crops and flips that depend on each sample's key alone.

Images are (samples, height, width, channels) of any number type. A transform takes a batch of
images and a key of 64 random bits for each. It has no other source of randomness, so the result
for a sample does not depend on its batch or on the worker that computes it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data.datasets import as_dataset, fetch
from hvdtrain.data.numeric import SEPARATOR
from hvdtrain.data.order import Draws, ordering_of, sample_keys
from hvdtrain.data.stream import Stream
from hvdtrain.errors import DataError
from hvdtrain.task import Arrays

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels
Size = tuple[int, int]  # height, width


def centre_box(width: int, height: int, size: Size) -> Box:
    """Return the largest centred box in an image that has the aspect ratio of ``size``."""
    scale = min(width / size[1], height / size[0])
    w, h = size[1] * scale, size[0] * scale
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def resize_image(image: Image.Image, box: Box, size: Size) -> Image.Image:
    """Return a part of a Pillow image, resized; the image itself if nothing changes."""
    if (image.height, image.width) == size and box == (0, 0, image.width, image.height):
        return image
    return image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)


def resize_array(image: NDArray[Any], box: Box, size: Size) -> NDArray[Any]:
    """Return a part of an image (height, width, channels), resized, in the image's number type."""
    if image.shape[:2] == size and box == (0, 0, size[1], size[0]):
        return image
    if image.dtype == np.uint8 and image.shape[2] == 3:
        return np.asarray(resize_image(Image.fromarray(image), box, size))
    exact = image if image.dtype == np.uint8 else image.astype(np.float32)  # one channel at a time
    channels = [Image.fromarray(np.ascontiguousarray(channel)) for channel in np.moveaxis(exact, 2, 0)]
    resized = np.stack([np.asarray(resize_image(channel, box, size)) for channel in channels], axis=2)
    return resized.astype(image.dtype, copy=False)


Keys = NDArray[np.uint64]
Transform = Callable[[NDArray[Any], Keys], NDArray[Any]]

_ATTEMPTS = 10  # to find a random box inside the image, as in torchvision


def uniform(keys: Keys, draw: int) -> NDArray[np.float64]:
    """Return a random number in [0, 1) for each sample; those of several draws are independent."""
    bits = sample_keys(keys.view(np.int64), 0, draw)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def transform_keys(keys: Keys, place: int) -> Keys:
    """Return the keys for one of several transforms, so that no two use the same random numbers."""
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
        self.ordering = ordering_of(self._dataset)
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


def _checked(images: NDArray[Any]) -> tuple[int, ...]:
    if images.ndim != 4:
        raise DataError(
            f"augmentation takes images (samples, height, width, channels), found shape {images.shape}"
        )
    return images.shape


# what a mixed batch has in addition: of each key but the inputs, the other sample's; and its share
OTHERS, SHARE = "mixed_", "mixing_share"
_POINTS = 4097
_CHANNELS = 4  # at most, to tell the axis of an image's channels


class Mixed:
    """A data set whose samples are mixed with any others in training: Zhang et al. 2018, Yun et al. 2019."""

    def __init__(self, dataset: Any, mixup: float, cutmix: float) -> None:
        if isinstance(dataset, Stream):
            raise DataError(
                "mixup and cutmix need data with an index, and found a stream",
                "Mix in the task's train_collate, or leave them out.",
            )
        self._dataset, self._mixup, self._cutmix = dataset, mixup, cutmix
        self.ordering = ordering_of(dataset)
        if hasattr(dataset, "batch"):  # it may be read for several steps at once
            self.batch = lambda indices: fetch(dataset, indices)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return {name: array[0] for name, array in fetch(self._dataset, np.asarray([index])).items()}

    def augmented(self, indices: NDArray[np.int64], keys: Keys) -> Arrays:
        """Fetch many samples and their partners, and mix their inputs."""
        count, draws = len(indices), transform_keys(keys, 2)
        both = self._with_partners(indices, keys)
        inputs = [name for name in both if name.partition(SEPARATOR)[0] == "inputs"]
        if not inputs:
            raise DataError(
                f"mixup and cutmix mix 'inputs'; samples have {sorted(both)}",
                "Name them: hvdtrain.as_dataset(data, inputs=...).",
            )
        cuts = np.full(count, bool(self._cutmix))
        if self._mixup and self._cutmix:
            cuts = uniform(draws, 0) < 0.5
        number = uniform(draws, 1)
        shares = 1 - np.where(cuts, beta(number, self._cutmix), beta(number, self._mixup))  # of the partner
        if self._cutmix:
            height, width = _sides(inputs, both)
            pasted = boxes(draws, shares, *(both["inputs"].shape[axis] for axis in (height, width)))
            pasted &= cuts[:, None, None]
            shares = np.where(cuts, pasted.mean((1, 2)), shares)
        result = {name: array[:count] for name, array in both.items()}
        result |= {OTHERS + name: array[count:] for name, array in both.items() if name not in inputs}
        result |= {name: _mixed(name, both[name], np.where(cuts, 0, shares)) for name in inputs}
        if self._cutmix and cuts.any():
            others = [axis for axis in range(1, both["inputs"].ndim) if axis not in (height, width)]
            chosen = np.expand_dims(pasted, others)
            result["inputs"] = np.where(chosen, both["inputs"][count:], result["inputs"])
        return {**result, SHARE: shares.astype(np.float32)}

    def _with_partners(self, indices: NDArray[np.int64], keys: Keys) -> Arrays:
        """Fetch samples, and behind them their partners."""
        numbers = uniform(transform_keys(keys, 0), 0)
        drawn = self.ordering.at(numbers) if isinstance(self.ordering, Draws) else numbers * len(self)
        partners = drawn.astype(np.int64)
        all_keys = np.concatenate([keys, transform_keys(keys, 1)])
        is_augmented = hasattr(self._dataset, "augmented")
        both = np.concatenate([indices, partners])
        return fetch(self._dataset, both, all_keys if is_augmented else None)


def beta(uniforms: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Return numbers with the distribution Beta(alpha, alpha) for uniform ones in [0, 1); 1 for alpha 0."""
    if not alpha:
        return np.ones_like(uniforms)
    s = np.linspace(0, 0.5**alpha, _POINTS)
    x = s ** (1 / alpha)
    density = (1 - x) ** (alpha - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    low = np.interp(np.minimum(uniforms, 1 - uniforms), below / below[-1] / 2, s) ** (1 / alpha)
    return np.where(uniforms < 0.5, low, 1 - low)


def boxes(keys: Keys, shares: NDArray[np.float64], height: int, width: int) -> NDArray[np.bool_]:
    """Return which pixels (samples, height, width) the box covers that takes a share of each image."""
    inside = []
    for draw, size in ((2, height), (3, width)):
        centre = np.floor(uniform(keys, draw) * size)[:, None]
        half = np.floor(size * np.sqrt(shares) / 2)[:, None]
        places = np.arange(size)[None]
        inside.append((places >= centre - half) & (places < centre + half))
    return inside[0][:, :, None] & inside[1][:, None, :]


def _mixed(name: str, both: NDArray[Any], shares: NDArray[np.float64]) -> NDArray[Any]:
    """Return the first half of an array, mixed with the second."""
    if both.dtype != np.uint8 and both.dtype.kind != "f":
        raise DataError(
            f"mixup and cutmix mix numbers; {name!r} holds {both.dtype}",
            "Convert it to float32 if it is no index, or mix embeddings in the task's own loss.",
        )
    own, other = np.split(both, 2)
    exact = np.result_type(both.dtype, np.float32)
    parts = shares.reshape(-1, *[1] * (both.ndim - 1)).astype(exact)
    mixed: NDArray[Any] = own * (1 - parts) + other * parts
    return np.rint(mixed).astype(np.uint8) if both.dtype == np.uint8 else mixed.astype(both.dtype)


def _sides(inputs: list[str], both: Arrays) -> tuple[int, int]:
    """Return the axes of an image's height and width."""
    shape = both[inputs[0]].shape
    if inputs == ["inputs"] and (len(shape) == 3 or (len(shape) == 4 and shape[3] <= _CHANNELS)):
        return 1, 2
    if inputs == ["inputs"] and len(shape) == 4 and shape[1] <= _CHANNELS:
        return 2, 3
    raise DataError(
        f"cutmix cuts images with up to {_CHANNELS} channels, on the first or the last axis; inputs have "
        f"shape {shape[1:]}",
        "Use mixup.",
    )


def partner_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch, flat or nested, with what it holds of the samples that its own were mixed with."""
    others = {name.removeprefix(OTHERS): value for name, value in batch.items() if name.startswith(OTHERS)}
    return {**batch, **others}
