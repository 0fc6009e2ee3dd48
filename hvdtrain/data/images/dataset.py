"""The data set of the task ``images``: images of a source, augmented and normalised batch by batch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.augment import Keys, RandomResizedCrop, Transform, apply, transform_keys
from hvdtrain.data.images.sources import ImageSource
from hvdtrain.data.resize import Size
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.task import Arrays

_SAMPLED = 512  # images from which mean and standard deviation are computed


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of bytes: (byte / 255 - mean) / std, for each channel.

    Attributes:
        mean: of each channel, in units of 255.
        std: of each channel, in units of 255; above 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the normalised images."""
        scale = 1 / (255 * np.asarray(self.std))
        result = np.multiply(images, scale.astype(np.float32), dtype=np.float32)
        result -= (np.asarray(self.mean) / np.asarray(self.std)).astype(np.float32)
        return result


class ImageData:
    """Images with their labels, a Dataset.

    Args:
        source: the images.
        chosen: indices of the images that belong to this set; all if None.
        size: height and width to which images are resized.
        normalisation: the normalisation of their bytes.
        transforms: their augmentation; ``RandomResizedCrop`` can only be the first.
    """

    def __init__(
        self,
        source: ImageSource,
        chosen: NDArray[np.int64] | None,
        size: Size,
        normalisation: Normalisation,
        transforms: tuple[Transform, ...] = (),
    ) -> None:
        self._source = source
        self._chosen = chosen
        self._size = size
        self._normalisation = normalisation
        self._transforms = transforms

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
    """Return the normalisation by mean and standard deviation of evenly spaced images.

    Sums are of integers, so the result is the same on every machine. Images that cannot be read
    are left out.

    Raises:
        DataError: If none of the images can be read.
    """
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
