"""Samples that cannot be read: an error, or replaced by the next readable sample."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.datasets import fetch, stack
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.task import Arrays

# if so many samples in a row cannot be read, the data set is at fault
_MOST_IN_A_ROW = 100


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read, and the one that replaces it."""

    place: int  # its position among the samples that were fetched together
    index: int  # its index in the data set
    replacement_index: int  # index of the next readable sample
    problem: str  # the message of the data set's error

    def describe(self, of_set: str = "") -> str:
        """Return the sample and its problem, as text; ``of_set`` follows the index."""
        return f"sample {self.index}{of_set}: {self.problem}"


Fetched = tuple[Arrays, list[BadSample]]
# fetches samples, stacked, by their indices and the seeds of their augmentation
Fetch = Callable[[NDArray[np.int64], NDArray[np.uint64] | None], Fetched]


@dataclass(frozen=True)
class LocalFetch:
    """Fetches samples in this process."""

    dataset: Any
    skip: bool = False

    def __call__(self, indices: NDArray[np.int64], keys: NDArray[np.uint64] | None = None) -> Fetched:
        """Fetch samples, stacked. The replacement of one depends on its index alone."""
        try:
            return fetch(self.dataset, indices, keys), []
        except BadSampleError:
            if not self.skip:
                raise
        rows, used, bad = [], [], []
        for place, index in enumerate(indices):
            row, replacement_index, problem = self._first_readable(int(index), keys, place)
            rows.append(row)
            used.append(replacement_index)
            if problem:
                bad.append(BadSample(place, int(index), replacement_index, problem))
        if hasattr(self.dataset, "collated"):
            return fetch(self.dataset, np.asarray(used)), bad
        return stack(rows, np.asarray(used)), bad

    def _first_readable(
        self, index: int, keys: NDArray[np.uint64] | None, place: int
    ) -> tuple[Arrays, int, str]:
        """Return a sample or the next readable one, its index, and the message of the first error."""
        problem, size = "", len(self.dataset)
        key = None if keys is None else keys[place : place + 1]
        tries = min(size, _MOST_IN_A_ROW)
        for candidate in range(index, index + tries):
            try:
                arrays = fetch(self.dataset, np.asarray([candidate % size]), key)
                return {name: array[0] for name, array in arrays.items()}, candidate % size, problem
            except BadSampleError as error:
                problem = problem or error.problem
        raise DataError(
            f"{tries} samples in a row cannot be read, from sample {index}: {problem}",
            "on_bad_sample: skip is meant for a few bad files; check the data set.",
        )
