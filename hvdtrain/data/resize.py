"""Resizing parts of images with Pillow: bilinear with antialiasing, equal for files and arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
    channels = [_channel(image[:, :, channel]) for channel in range(image.shape[2])]
    resized = np.stack([np.asarray(resize_image(channel, box, size)) for channel in channels], axis=2)
    return resized.astype(image.dtype, copy=False)


def _channel(values: NDArray[Any]) -> Image.Image:
    """Return one channel as a Pillow image: of bytes if it consists of bytes, otherwise of floats."""
    exact = values if values.dtype == np.uint8 else values.astype(np.float32)
    return Image.fromarray(np.ascontiguousarray(exact))
