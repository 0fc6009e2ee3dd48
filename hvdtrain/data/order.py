"""The order of samples and how batches are sharded over workers: pure functions.

Training reads an endless stream of positions: permutation 0 of the data set, then permutation 1,
and so on. Each step takes the next ``global_batch`` positions, and each worker its part of them.
So every sample is seen exactly once per epoch at any batch size and any number of workers, and the
progress of training is one integer: the number of positions taken.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import DataError

_MASK64 = (1 << 64) - 1
_DRAWS = -5  # what is drawn, so that its numbers are not those of augmentation
_BY_LENGTH = -6  # what the permutations of runs are of
_RUNS, _LONGEST_RUN = 16, 512  # of samples of similar length: how many are permuted together, and their size
_ROUNDS = 8  # fewer leave the permutations of a handful of samples visibly uneven


def mix(*values: int) -> int:
    """Return a 64-bit hash of integers, the same on every machine and in every version.

    SplitMix64's output function (Steele, Lea and Flood 2014), chained over the values.
    """
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + value * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


def permute(offsets: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the indices of the samples at these offsets of an epoch, which are below ``size``; any shape.

    A Feistel network over the smallest power of two that holds ``size``, walked until the result
    is below ``size`` (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): an epoch of any size
    begins and resumes without delay, and does not depend on a library's random numbers.
    """
    keys = [mix(seed, epoch, r) for r in range(2 * _ROUNDS)]
    bits = max(2, (size - 1).bit_length())
    result = _feistel(offsets.astype(np.uint64), bits, keys)
    outside = result >= size
    while outside.any():
        result[outside] = _feistel(result[outside], bits, keys)
        outside = result >= size
    return result.astype(np.int64)


def _feistel(values: NDArray[np.uint64], bits: int, keys: list[int]) -> NDArray[np.uint64]:
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for k in range(0, len(keys), 2):
        high ^= _scramble(low, keys[k]) & high_mask
        low ^= _scramble(high, keys[k + 1]) & low_mask
    return (high << low_bits) | low


def _scramble(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Mix 64 bits (the finaliser of MurmurHash3) after adding a key."""
    x = values ^ np.uint64(key)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return x


def sample_keys(indices: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample in one epoch, the seeds of its augmentation."""
    return _scramble(_scramble(indices.astype(np.uint64), mix(seed, epoch, -1)), mix(seed, epoch, -2))


@dataclass(frozen=True, eq=False)
class Draws:
    """With which probabilities samples are drawn."""

    cumulated: NDArray[np.float64]

    def at(self, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the samples that uniform numbers in [0, 1) draw."""
        return np.searchsorted(self.cumulated, uniforms, side="right").astype(np.int64)

    @property
    def identity(self) -> str:
        """A text that is equal if the probabilities are."""
        return f"drawn {blake2b(self.cumulated.tobytes(), digest_size=8).hexdigest()}"

    def permuted(self, offsets: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the indices at these offsets of an epoch: each is drawn with replacement."""
        numbers = sample_keys(offsets, mix(seed, _DRAWS), epoch) >> np.uint64(11)
        return self.at(numbers.astype(np.float64) * 2.0**-53)


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths of samples: those of similar length follow one another.

    The permutation of an epoch is cut into windows. Each is sorted by length and cut into runs, and the runs
    are permuted. So each sample comes once per epoch, and its place depends on seed and lengths alone.
    """

    values: NDArray[np.int64]  # (samples,)

    @property
    def run(self) -> int:
        """Samples that follow one another sorted by length; a batch of fewer has similar ones."""
        return min(_LONGEST_RUN, max(1, len(self.values) // _RUNS))

    @property
    def window(self) -> int:
        """Samples that are sorted together; not all of them, so that batches of epochs differ."""
        return self.run * min(_RUNS, max(1, len(self.values) // (4 * self.run)))

    @property
    def identity(self) -> str:
        """A text that is equal if the lengths are."""
        return f"by length {blake2b(self.values.tobytes(), digest_size=8).hexdigest()}"

    def permuted(self, offsets: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the indices at these offsets of an epoch."""
        windows, places = np.divmod(offsets, self.window)
        result = np.empty_like(offsets)
        for window in np.unique(windows):
            inside = windows == window
            result[inside] = _window_of(self, size, seed, epoch, int(window))[places[inside]]
        return result


@lru_cache(maxsize=4)
def _window_of(lengths: Lengths, size: int, seed: int, epoch: int, window: int) -> NDArray[np.int64]:
    """Return the indices of a window of an epoch, (samples of the window,)."""
    begin = window * lengths.window
    indices = permute(np.arange(begin, min(begin + lengths.window, size)), size, seed, epoch)
    indices = indices[np.argsort(lengths.values[indices], kind="stable")]
    count = -(-len(indices) // lengths.run)
    runs = permute(np.arange(count), count, mix(seed, _BY_LENGTH, window), epoch)
    if epoch == window == 0:  # the longest of it first: a lack of memory shows in the dry run
        indices, runs = indices[::-1], np.concatenate([[0], runs[runs != 0]])
    return np.concatenate([indices[run * lengths.run : (run + 1) * lengths.run] for run in runs])


_BLOCKS, _WINDOWS = -3, -4  # what the permutations are of, so that their keys differ


@dataclass(frozen=True)
class Blocks:
    """How the samples of a data set are stored: in blocks that can only be read whole.

    In each epoch the blocks are permuted and taken in windows of ``mixed``, and the samples of a window are
    permuted. So the samples of few blocks follow one another, each sample comes once per epoch, and the
    sample at a position depends on the seed and the blocks alone.
    """

    sizes: tuple[int, ...]  # samples of each block, in the order of the data set; none is 0
    mixed: int  # how many blocks are shuffled together

    @cached_property
    def identity(self) -> str:
        """A text that is equal if the order of training is."""
        return blake2b(f"{self.mixed} {self.sizes}".encode(), digest_size=8).hexdigest()

    def permuted(self, offsets: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the indices at these offsets of an epoch."""
        firsts, ends, edges = _epoch_of(self, seed, epoch)
        windows = np.searchsorted(edges, offsets, side="right") - 1
        places = np.empty_like(offsets)  # in the permuted blocks
        for window in np.unique(windows):
            inside, begin = windows == window, edges[window]
            count, key = int(edges[window + 1] - begin), mix(seed, _WINDOWS, int(window))
            places[inside] = begin + permute(offsets[inside] - begin, count, key, epoch)
        block = np.searchsorted(ends, places, side="right") - 1
        result: NDArray[np.int64] = firsts[block] + places - ends[block]
        return result


@lru_cache(maxsize=4)
def _epoch_of(blocks: Blocks, seed: int, epoch: int) -> tuple[NDArray[np.int64], ...]:
    """Return the permuted blocks of an epoch: their first indices, their ends; the edges of windows."""
    sizes, count = np.asarray(blocks.sizes, np.int64), len(blocks.sizes)
    order = permute(np.arange(count), count, mix(seed, _BLOCKS), epoch)
    firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]])[order]
    ends = np.concatenate([[0], np.cumsum(sizes[order])])
    edges = np.append(ends[: -1 : blocks.mixed], ends[-1])
    return firsts, ends, edges


Ordering = Draws | Lengths | Blocks


@dataclass(frozen=True)
class ShuffledOrder:
    """The order of training, without end: in each epoch a new permutation, or another ordering."""

    size: int
    seed: int
    ordering: Ordering | None = None

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of the samples at these positions of the stream; any shape."""
        epochs, offsets = np.divmod(positions, self.size)
        result = np.empty_like(offsets)
        permuted = permute if self.ordering is None else self.ordering.permuted
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            result[inside] = permuted(offsets[inside], self.size, self.seed, int(epoch))
        return result

    def keys(self, positions: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the seeds for augmenting these samples, of the shape of ``indices``."""
        epochs, offsets = np.divmod(positions, self.size)
        named = offsets if isinstance(self.ordering, Draws) else indices  # one that is drawn twice has two
        result = np.empty(indices.shape, np.uint64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            result[inside] = sample_keys(named[inside], self.seed, int(epoch))
        return result


def ordering_of(dataset: Any) -> Ordering | None:
    """Return what the order of training on a data set follows, but for size and seed; None of most."""
    found = getattr(dataset, "ordering", None)
    return found if isinstance(found, Ordering) else None


def order_identity(dataset: Any) -> str:
    """Return a text that is equal if the order of training on a data set of one size and seed is."""
    ordering = ordering_of(dataset)
    return str(getattr(dataset, "order_identity", "")) if ordering is None else ordering.identity


class Ordered:
    """A data set with the order of training that its task gives; else the data set itself."""

    def __init__(self, dataset: Any, ordering: Draws | Lengths) -> None:
        self.dataset, self.ordering = dataset, ordering

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
    if hasattr(dataset, "with_collate"):
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


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is sharded over workers and micro-batches.

    The batch is split into ``workers * accumulate`` slots, as evenly as possible, and each slot is
    padded to the length of the longest, or to ``micro``. Padding has weight 0.
    """

    global_batch: int  # samples per step on all workers; at least one per slot, unless ``micro`` is given
    workers: int
    accumulate: int = 1  # micro-batches per worker and step
    micro: int | None = None  # samples per worker and micro-batch; by default as few as possible

    @classmethod
    def of_size(cls, global_batch: int, workers: int, micro: int) -> "BatchPlan":
        """Return how a batch is sharded in micro-batches of this size, as few as hold it."""
        return cls(global_batch, workers, -(-global_batch // (workers * micro)), micro)

    @property
    def micro_batch(self) -> int:
        """Samples per worker and micro-batch, padding included."""
        return self.micro or -(-self.global_batch // (self.workers * self.accumulate))

    @property
    def is_even(self) -> bool:
        """Return whether every slot of a full batch is full."""
        return self.global_batch == self.workers * self.accumulate * self.micro_batch

    def part(self, rank: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the places within a step of ``count`` samples of one worker, and which are no padding.

        Both are (accumulate, micro_batch). Padding repeats the first place, which can always be read.
        """
        slots = self.workers * self.accumulate
        slot = rank + self.workers * np.arange(self.accumulate)[:, None]
        first, last = slot * count // slots, (slot + 1) * count // slots
        places = first + np.arange(self.micro_batch)[None, :]
        real = places < last
        return np.where(real, places, 0), real
