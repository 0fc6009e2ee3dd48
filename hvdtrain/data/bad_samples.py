"""Samples that cannot be read: stop there, or put the next readable one in their place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.datasets import fetch, stack
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.task import Arrays

# where so many in a row cannot be read, the data set is at fault, not a sample
_MOST_IN_A_ROW = 100


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read, and the one that stands in for it.

    Attributes:
        place: where in the read it was.
        index: its index in the data set.
        stand_in: the index of the next readable one.
        problem: what the data set said.
    """

    place: int
    index: int
    stand_in: int
    problem: str

    def in_words(self) -> str:
        """Say which one it is and what is wrong with it."""
        return f"sample {self.index}: {self.problem}"


Fetched = tuple[Arrays, list[BadSample]]
# gives samples, stacked, by their indices and the seeds of their augmentation
Fetch = Callable[[NDArray[np.int64], NDArray[np.uint64] | None], Fetched]


@dataclass(frozen=True)
class LocalFetch:
    """Fetches samples in this process.

    Args:
        dataset: the data set.
        skip: whether the next readable sample stands in for one that cannot be read.
    """

    dataset: Any
    skip: bool = False

    def __call__(self, indices: NDArray[np.int64], keys: NDArray[np.uint64] | None = None) -> Fetched:
        """Fetch samples, stacked along a new first axis.

        What stands in for a sample is a function of its index alone, so it is the same on every
        worker, at any number of workers and readers.

        Args:
            indices: which samples, one-dimensional.
            keys: the seed of each one's augmentation, or None.

        Raises:
            BadSampleError: where one cannot be read and none are skipped.
            DataError: where too many in a row cannot be read.
        """
        try:
            return fetch(self.dataset, indices, keys), []
        except BadSampleError:
            if not self.skip:
                raise
        rows, used, bad = [], [], []
        for place, index in enumerate(indices):
            row, stand_in, problem = self._first_readable(int(index), keys, place)
            rows.append(row)
            used.append(stand_in)
            if problem:
                bad.append(BadSample(place, int(index), stand_in, problem))
        return stack(rows, np.asarray(used)), bad

    def _first_readable(
        self, index: int, keys: NDArray[np.uint64] | None, place: int
    ) -> tuple[Arrays, int, str]:
        """Give a sample or the next readable one, its index, and the problem of the first."""
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
            "on_bad_sample: skip is for a few bad files; check the data set.",
        )
