"""A data set whose task gives the order of training: drawn by probability, or sorted by length."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.order import Draws, Lengths
from hvdtrain.data.stream import Stream
from hvdtrain.errors import DataError


class Ordered:
    """A data set with the order of training that its task gives; else the data set itself."""

    blocks = None  # samples are taken from anywhere

    def __init__(self, dataset: Any, ordering: Draws | Lengths) -> None:
        self.dataset, self.ordering, self.order_identity = dataset, ordering, ordering.identity

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # as it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def unordered(dataset: Any) -> Any:
    """Return a data set without the order that its task gives."""
    return dataset.dataset if isinstance(dataset, Ordered) else dataset


def draws_of(dataset: Any, given: Any) -> Draws:
    """Return the probabilities that a task's ``sample_probabilities`` gives."""
    numbers = _numbers_of(dataset, given, "sample_probabilities", "Of class weights, give weights[targets].")
    if not numbers.any():
        raise DataError("sample_probabilities() must not be all 0", "Correct them.")
    cumulated = np.cumsum(numbers) / numbers.sum()
    cumulated[np.flatnonzero(numbers)[-1] :] = 1.0  # rounding draws no sample of probability 0
    return Draws(cumulated)


def lengths_of(dataset: Any, given: Any) -> Lengths:
    """Return the lengths that a task's ``sample_lengths`` gives, rounded."""
    remedy = "Give what a batch is padded to, such as the number of tokens."
    return Lengths(np.rint(_numbers_of(dataset, given, "sample_lengths", remedy)).astype(np.int64))


def _numbers_of(dataset: Any, given: Any, method: str, remedy: str) -> NDArray[np.float64]:
    """Return what a method gives for each sample of a data set."""
    if isinstance(dataset, Stream):
        raise DataError(
            f"{method}() needs data with an index, and found a stream",
            "Leave it out; the loss weighs samples by class_weights or the key 'weights'.",
        )
    if isinstance(dataset, Ordered):
        raise DataError(
            "the task has sample_probabilities() and sample_lengths(), and each is an order of its own",
            "Leave one out.",
        )
    numbers: NDArray[np.float64] = np.asarray(given, np.float64)
    if numbers.shape != (len(dataset),):
        raise DataError(
            f"{method}() must give a number for each of the {len(dataset):,} training samples; found shape "
            f"{numbers.shape}",
            remedy,
        )
    wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))
    if len(wrong):
        found = f"sample {wrong[0]} has {numbers[wrong[0]]}"
        raise DataError(f"{method}() must be finite and not negative; {found}", "Correct it.")
    return numbers
