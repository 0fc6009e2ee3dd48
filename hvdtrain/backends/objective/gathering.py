"""``hvdtrain.all_gather``: the rows of all workers, for a loss that compares samples with one another."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import ENDINGS, PeerLostError, TaskError
from hvdtrain.workers.seeding import random_state_kept

# name to values, (samples,) or one number of all of them; and weights of the same shape, if they have some
GivenArrays = Mapping[str, tuple[NDArray[Any], NDArray[Any] | None]]
ValuesOf = Callable[[NDArray[np.int64], int], GivenArrays]  # of rows of a batch, with a seed
_PAGE = "`hvdtrain docs global-losses` shows losses over the global batch."


def all_gather(tensor: Any, positions: bool = False) -> Any:
    """Return the rows of a tensor of all workers, in the order of ranks; for losses and metrics of a task.

    Gradients flow through it: what the losses of all workers give to a row is summed. Padding is left out.
    Each worker must call it equally often. With one worker, and in a prediction or an export, it returns
    the tensor itself.

    Args:
        tensor: a tensor (rows, ...); workers may have different numbers of rows.
        positions: whether to return a pair: the rows, and where this worker's own are among them, (rows,).

    Raises:
        TaskError: If it has no rows, or is called outside of a loss of a job of several workers.
    """
    return _alone(tensor, positions) if Gathering.built is None else Gathering.built(tensor, positions)


def parted() -> AbstractContextManager[None]:
    """Return a context in which each worker has its own rows alone, also in losses."""
    return nullcontext() if Gathering.built is None else Gathering.built.alone()


class Gathering(ABC):
    """Gathers rows for the losses that a backend computes."""

    built: "Gathering | None" = None  # that of the backend that was built last in this process

    def __init__(self, size: int) -> None:
        self.is_used = False
        self._is_alone, self._is_parted = size == 1, False
        self._workers: Any = None
        self._weights: Any = None
        self._calls = 0
        Gathering.built = self

    @contextmanager
    def among(self, workers: Any, weights: Any) -> Iterator[None]:
        """Return a context in which a loss may gather."""
        self._workers, self._weights, self._calls = workers, weights, 0
        try:
            yield
        finally:
            self._workers = self._weights = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context in which each worker has its own rows alone, as in a prediction."""
        before, self._is_parted = self._is_parted, True
        try:
            yield
        finally:
            self._is_parted = before

    def __call__(self, tensor: Any, positions: bool = False) -> Any:
        """Return what ``all_gather`` does."""
        if self._is_parted or (self._is_alone and self._weights is None):
            return _alone(tensor, positions)
        if self._weights is None:
            raise TaskError(
                "hvdtrain.all_gather was called outside of a loss or metric of a task, or with --stages",
                f"Call it in the task's loss; callbacks use Horovod's own functions. {_PAGE}",
                everywhere=True,
            )
        if not len(tensor.shape):
            raise TaskError(
                "hvdtrain.all_gather was given a single number; it joins rows",
                f"Give a tensor of shape (rows, ...), such as the embeddings of the samples. {_PAGE}",
                everywhere=True,
            )
        self.is_used, self._calls = True, self._calls + 1
        found = self._gather(tensor, f"hvdtrain.all_gather.{self._calls}")
        return found if positions else found[0]

    @abstractmethod
    def _gather(self, tensor: Any, name: str) -> tuple[Any, Any]:
        """Collective. Return the rows of all workers and the positions of this worker's own among them."""


def refuse_horovods_own(is_of_all: bool) -> None:
    """Refuse Horovod's allgather, of all workers, in a loss of samples that several workers have."""
    built = Gathering.built
    if is_of_all and built and built._weights is not None and not (built._is_alone or built._is_parted):
        raise TaskError(
            "a loss or metric calls Horovod's allgather, which takes padding for samples, and divides the "
            "gradient by the number of workers",
            f"Call hvdtrain.all_gather(tensor) in its place. {_PAGE}",
            everywhere=True,
        )


def _alone(tensor: Any, positions: bool) -> Any:
    if not positions:
        return tensor
    library = sys.modules[type(tensor).__module__.partition(".")[0]]
    if library.__name__ == "tensorflow":
        return tensor, library.range(library.shape(tensor)[0])
    own = library.arange(len(tensor))
    return tensor, own.to(tensor.device) if library.__name__ == "torch" else own


def find_comparing(values_of: ValuesOf, samples: int, tolerance: float) -> str:
    """Return a sentence on how a loss or metric of a sample depends on other samples; empty if it does not.

    The first half of a batch is computed together with the second, and together with itself. A task that
    gives other values when the same is repeated, or fails with such a batch, is left alone. So is one that
    draws random numbers, where values of batches of unequal sizes, or means, are compared.
    """
    half = samples // 2
    whole, first, second = (np.arange(samples) for _ in range(3))
    first[half : 2 * half], second[:half] = whole[:half], whole[half : 2 * half]
    if not half:
        whole, first = np.zeros(2, np.int64), np.zeros(1, np.int64)

    def values(rows: NDArray[np.int64], seed: int = 0) -> GivenArrays:
        with random_state_kept():
            return values_of(rows, seed)

    try:
        here, doubled = values(whole), values(first)
        for name, (found, _) in here.items():
            if found.ndim:
                pairs = [
                    (one[: half or 1], other[: half or 1])
                    for one, other in zip(here[name], doubled[name], strict=True)
                    if one is not None and other is not None
                ]
            elif half:  # a mean: twice its sum is that of both halves, each of them twice
                other = _sums(doubled[name]) + _sums(values(second)[name])
                pairs = [(2 * _sums(here[name]), other)]
            else:
                pairs = [(_sums(here[name]), 2 * _sums(doubled[name]))]
            alike = len(pairs) if half and found.ndim else 0  # in these, a sample has the same random numbers
            if half and found.ndim and not _differ(found, found[:1], 1e-6):
                # of equal samples, such as a stream's first one, fewer are tried
                fewer = values(whole[:half])[name][0]
                pairs += [] if _differ(fewer, fewer[:1], 1e-6) else [(found[:half], fewer)]
            place = next((place for place, pair in enumerate(pairs) if _differ(*pair, tolerance)), None)
            if place is None:
                continue
            seeds = (0,) if place < alike else (0, 1)
            if any(_differ(found, values(whole, seed)[name][0], 1e-7) for seed in seeds):
                return ""  # it draws numbers, or counts its calls
            if not found.ndim:
                return f"the {name} of a batch is not the mean over its samples, each taken by itself"
            return f"the {name} of a sample depends on the other samples of its batch"
    except (*ENDINGS, PeerLostError):
        raise
    except Exception:  # such as of a loss that takes no sample twice
        return ""
    return ""


def _sums(given: tuple[NDArray[Any], NDArray[Any] | None]) -> NDArray[Any]:
    """Return the sum that a batch's mean stands for, and of how much it is the mean."""
    mean, weight = given
    assert weight is not None  # a batch's mean is Weighted
    return np.stack((mean * weight, weight))


def _differ(one: NDArray[Any], other: NDArray[Any], tolerance: float) -> bool:
    """Return whether numbers differ, relatively to the largest; those that are not finite are left out."""
    scale = np.abs(one).max(initial=0) + np.abs(other).max(initial=0)
    return bool(np.isfinite(scale) and (np.abs(one - other) > tolerance * scale).any())


def comparing_error(comparing: str, workers: int) -> TaskError:
    """Return the error of a loss that would compare only the samples that one worker has."""
    others = f"{workers} workers" if workers > 1 else "workers of an elastic job"
    return TaskError(
        f"{comparing}. Each of the {others} sees its own samples only, so that the result would be another "
        "than with one worker",
        f"Gather what is compared with hvdtrain.all_gather(tensor). {_PAGE} If each worker's own samples are "
        "meant, give the task per_worker_loss = True.",
    )
