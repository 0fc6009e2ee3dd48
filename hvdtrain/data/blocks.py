"""The order of samples that are stored in blocks, such as the row groups of Parquet files."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.order import DrawnOrder, Draws, ShuffledOrder, mix, permute

_BLOCKS, _WINDOWS = -3, -4  # what the permutations are of, so that their keys differ


@dataclass(frozen=True)
class Blocks:
    """How the samples of a data set are stored: in blocks that can only be read whole.

    Args:
        sizes: samples of each block, in the order of the data set; none is 0.
        mixed: how many blocks are shuffled together.
    """

    sizes: tuple[int, ...]
    mixed: int

    @cached_property
    def identity(self) -> str:
        """A text that is equal if the order of training is."""
        return blake2b(f"{self.mixed} {self.sizes}".encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class BlockOrder(ShuffledOrder):
    """The order of training on blocks: in each epoch a new permutation of the blocks, without end.

    The blocks of an epoch are taken in windows of ``blocks.mixed``, and the samples of a window are permuted.
    So the samples of few blocks follow one another, each sample comes once per epoch, and the sample at a
    position depends on the seed and the blocks alone.
    """

    blocks: Blocks

    def _permuted(self, offsets: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return the indices at these offsets of an epoch."""
        firsts, ends, edges = _epoch_of(self.blocks, self.seed, epoch)
        windows = np.searchsorted(edges, offsets, side="right") - 1
        places = np.empty_like(offsets)  # in the permuted blocks
        for window in np.unique(windows):
            inside, begin = windows == window, edges[window]
            size, seed = int(edges[window + 1] - begin), mix(self.seed, _WINDOWS, int(window))
            places[inside] = begin + permute(offsets[inside] - begin, size, seed, epoch)
        block = np.searchsorted(ends, places, side="right") - 1
        result: NDArray[np.int64] = firsts[block] + places - ends[block]
        return result


@lru_cache(maxsize=4)
def _epoch_of(blocks: Blocks, seed: int, epoch: int) -> tuple[NDArray[np.int64], ...]:
    """Return the blocks of an epoch in their order, and its windows.

    Returns:
        The index of the first sample of each block; where each block begins in the epoch, and its end; where
        each window begins, and the end of the epoch.
    """
    sizes, count = np.asarray(blocks.sizes, np.int64), len(blocks.sizes)
    order = permute(np.arange(count), count, mix(seed, _BLOCKS), epoch)
    firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]])[order]
    ends = np.concatenate([[0], np.cumsum(sizes[order])])
    edges = np.append(ends[: -1 : blocks.mixed], ends[-1])
    return firsts, ends, edges


def blocks_of(dataset: Any) -> Blocks | None:
    """Return how a data set's samples are stored; None if each can be read by itself."""
    found = getattr(dataset, "blocks", None)
    return found if isinstance(found, Blocks) else None


def order_identity(dataset: Any) -> str:
    """Return a text that is equal if the order of training on a data set of one size and seed is."""
    blocks = blocks_of(dataset)
    return str(getattr(dataset, "order_identity", "")) if blocks is None else blocks.identity


def training_order(dataset: Any, size: int, seed: int) -> ShuffledOrder:
    """Return the order of training on a data set.

    Args:
        dataset: the data set.
        size: its number of samples.
        seed: the job's seed.
    """
    blocks = blocks_of(dataset)
    draws = getattr(dataset, "draws", None)
    if isinstance(draws, Draws):
        return DrawnOrder(size, seed, draws)
    return ShuffledOrder(size, seed) if blocks is None else BlockOrder(size, seed, blocks)
