"""Data: wrapping users' data sets, the order of samples, augmentation, and reading batches ahead.

Users' tasks can use :class:`Augmented` with :class:`Crop`, :class:`Flip` and
:class:`RandomResizedCrop`. They are imported on first use, so that a job without images does not
import Pillow.
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
