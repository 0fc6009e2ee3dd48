"""A data set whose training samples are drawn with given probabilities, with replacement."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.order import Draws
from hvdtrain.data.stream import Stream
from hvdtrain.errors import DataError


class Drawn:
    """A data set that knows with which probabilities its samples are drawn; else the data set itself.

    Args:
        dataset: the data set.
        given: a number for each sample, as ``sample_probabilities()`` gives; only ratios matter.

    Attributes:
        dataset: the data set.
        blocks: None: samples are drawn from anywhere.
        draws: with which probabilities.
        order_identity: a text that is equal if they are.

    Raises:
        DataError: If they are no probabilities of these samples.
    """

    blocks = None

    def __init__(self, dataset: Any, given: Any) -> None:
        if isinstance(dataset, Stream):
            raise DataError(
                "sample_probabilities() needs data with an index, and found a stream",
                "Leave it out, and weigh samples by class_weights or the key 'weights'.",
            )
        numbers: NDArray[np.float64] = np.asarray(given, np.float64)
        if numbers.shape != (len(dataset),):
            raise DataError(
                f"sample_probabilities() must give a number for each of the {len(dataset):,} training "
                f"samples; found shape {numbers.shape}",
                "Of class weights, give weights[targets].",
            )
        is_right = np.isfinite(numbers) & (numbers >= 0)
        if not is_right.all() or not numbers.any():
            place = int(np.argmin(is_right))
            raise DataError(
                "sample_probabilities() must be finite and not negative, and not all 0; "
                f"sample {place} has {numbers[place]}",
                "Correct them.",
            )
        self.dataset = dataset
        cumulated = np.cumsum(numbers) / numbers.sum()
        cumulated[np.flatnonzero(numbers)[-1] :] = 1.0  # rounding draws no sample of probability 0
        self.draws = Draws(cumulated)
        self.order_identity = self.draws.identity

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # as it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def undrawn(dataset: Any) -> Any:
    """Return a data set without the probabilities of its samples."""
    return dataset.dataset if isinstance(dataset, Drawn) else dataset
