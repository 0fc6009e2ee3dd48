"""Handwritten digits: 1,797 scans of 8x8 pixels in 10 classes, which scikit-learn ships.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998.
"""

import importlib.util
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from hvdtrain.data.datasets import ArrayDataset
from hvdtrain.errors import DataError
from hvdtrain.models import convnet
from hvdtrain.models.choose import BuiltIn
from hvdtrain.tasks import _options as options


class Digits(BuiltIn):
    """Classify scikit-learn's handwritten digits with a small convolutional net.

    Args:
        split_seed: seed of the split into training and evaluation data.
        eval_fraction: fraction of the data for evaluation.
    """

    defaults: ClassVar = options.IMAGE_DEFAULTS | {"weight_decay": 1e-4}

    @options.checked
    def __init__(
        self, split_seed: options.Seed = 0, eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    ) -> None:
        images, labels = _load()
        shuffled = np.random.RandomState(split_seed).permutation(len(images))
        kept = round(len(images) * (1 - eval_fraction))
        self._train = {"inputs": images[shuffled[:kept]], "targets": labels[shuffled[:kept]]}
        self._eval = {"inputs": images[shuffled[kept:]], "targets": labels[shuffled[kept:]]}

    def train_data(self) -> ArrayDataset:
        """Return the training data: inputs (8, 8, 1), standardised as (x - 4.9) / 6; targets, the digit."""
        return ArrayDataset(self._train)

    def eval_data(self) -> ArrayDataset:
        """Return the evaluation data, of the same form."""
        return ArrayDataset(self._eval)

    def _built_in(self) -> tuple[Any, dict[str, Any]]:
        return convnet, {"image_shape": (8, 8, 1), "classes": 10}


task = Digits


def _load() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return images and labels from the file of scikit-learn's load_digits.

    scikit-learn is not imported: that would take each worker more than a second and 60 MB.
    """
    package = importlib.util.find_spec("sklearn")
    path = Path(package.origin or "").parent / "datasets/data/digits.csv.gz" if package else Path()
    if not path.is_file():
        raise DataError("the digits are missing: they are a part of scikit-learn", "pip install scikit-learn")
    table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    images = ((table[:, :-1] - 4.9) / 6.0).reshape(-1, 8, 8, 1)
    return images, table[:, -1].astype(np.int64)
