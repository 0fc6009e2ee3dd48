"""Data: wrapping what users have, the order of samples, augmentation, feeding batches ahead.

For tasks of users: :class:`Augmented` with :class:`Crop`, :class:`Flip` and :class:`RandomResizedCrop`.
They are loaded on first use, so that a job without images does not load Pillow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Augmented", "Crop", "Flip", "RandomResizedCrop"]

if TYPE_CHECKING:
    from hvdtrain.data.augment import Augmented, Crop, Flip, RandomResizedCrop


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hvdtrain.data' has no attribute {name!r}")
    return getattr(import_module("hvdtrain.data.augment"), name)
