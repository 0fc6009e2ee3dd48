"""Feeding: the batches of one worker, read ahead in the background."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.bad_samples import BadSample, Fetch, LocalFetch
from hvdtrain.data.order import BatchPlan
from hvdtrain.task import Arrays

# Samples from a vectorised data set are read for several steps at once, so that a short step does
# not pay for a hand-over between threads: up to this many steps and bytes.
_STEPS_PER_READ = 64
_BYTES_PER_READ = 1 << 20
_TOLD_SECONDS = 1e-3


class Order(Protocol):
    """Which sample stands at which position."""

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the indices of the samples at these positions."""
        ...

    def keys(self, positions: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        """Give the seeds of the augmentation of these samples; None where they stay as they are."""
        ...


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One worker's part of one step, in host memory.

    Attributes:
        step: the step, counted from 0.
        arrays: name to array (accumulate, micro_batch, ...).
        weights: (accumulate, micro_batch) of float32; 0 marks padding. One and the same array for
            all full steps.
        total_weight: sum of the weights over all workers.
        indices: (accumulate, micro_batch), the samples' indices in the data set.
        bad: those among the real samples that could not be read.
    """

    step: int
    arrays: Arrays
    weights: NDArray[np.float32]
    total_weight: float
    indices: NDArray[np.int64]
    bad: tuple[BadSample, ...] = ()


@dataclass(frozen=True)
class Share:
    """Which batches one worker reads: its part of every step of a stretch of the stream.

    Args:
        plan: how a global batch is dealt.
        rank: the worker.
        first_step: number of the first step.
        first_sample: position of the first step in the stream.
        last_sample: where the stretch ends; the last step is padded up to its size.
    """

    plan: BatchPlan
    rank: int
    first_step: int
    first_sample: int
    last_sample: int

    @property
    def steps(self) -> int:
        """Number of steps in the stretch."""
        return math.ceil((self.last_sample - self.first_sample) / self.plan.global_batch)

    def positions(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:
        """Give positions, weights and the global number of samples of one step.

        Args:
            step: counted from 0 at the start of the stretch.
        """
        start = self.first_sample + step * self.plan.global_batch
        count = min(self.plan.global_batch, self.last_sample - start)
        places, weights = self._full if count == self.plan.global_batch else self._part(count)
        return start + places, weights, count

    @cached_property
    def _full(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self._part(self.plan.global_batch)

    def _part(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        places, real = self.plan.part(self.rank, count)
        return places, real.astype(np.float32)


class Reader:
    """Reads one worker's batches; ``reader[k]`` is a list of the batches of the k-th read.

    It has the form of a grain data source, so that grain can run it ahead of its use.

    Args:
        dataset: the data set.
        order: which sample comes when.
        share: which of them this worker reads.
        fetch: gives samples of the data set; this process does it itself where not given.
        replaces: whether another sample takes the place of one that cannot be read, as in training; in
            evaluation the place has weight 0.
    """

    def __init__(
        self, dataset: Any, order: Order, share: Share, fetch: Fetch | None = None, replaces: bool = True
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._share = share
        self._fetch = fetch or LocalFetch(dataset)
        self._replaces = replaces
        self._steps_per_read = self._choose_steps_per_read()

    def __len__(self) -> int:
        return math.ceil(self._share.steps / self._steps_per_read)

    def __getitem__(self, read: int) -> list[HostBatch]:
        first = read * self._steps_per_read
        steps = range(first, min(first + self._steps_per_read, self._share.steps))
        parts = [self._share.positions(step) for step in steps]
        positions = np.stack([positions for positions, _, _ in parts])
        indices = self._order.indices(positions)
        arrays, bad = self._fetch(indices.reshape(-1), self._keys(positions, indices))
        shaped = {name: a.reshape(indices.shape + a.shape[1:]) for name, a in arrays.items()}
        batches = [
            HostBatch(
                step=self._share.first_step + step,
                arrays={name: array[i] for name, array in shaped.items()},
                weights=weights,
                total_weight=float(count),
                indices=indices[i],
            )
            for i, (step, (_, weights, count)) in enumerate(zip(steps, parts, strict=True))
        ]
        return self._without(batches, bad) if bad else batches

    def _without(self, batches: list[HostBatch], bad: list[BadSample]) -> list[HostBatch]:
        """Put what could not be read down in the batches."""
        for sample in bad:
            step, place = divmod(sample.place, batches[0].indices.size)
            batch = batches[step]
            if batch.weights.flat[place] == 0:
                continue  # padding
            weights, indices = batch.weights, batch.indices.copy()
            if self._replaces:
                indices.flat[place] = sample.stand_in
            else:
                weights = weights.copy()  # other steps have the same
                weights.flat[place] = 0
            batches[step] = replace(batch, weights=weights, indices=indices, bad=(*batch.bad, sample))
        return batches

    def _keys(self, positions: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        if not hasattr(self._dataset, "augmented"):
            return None
        keys = self._order.keys(positions, indices)
        return None if keys is None else keys.reshape(-1)

    def _choose_steps_per_read(self) -> int:
        # samples fetched one by one may be slow to make: those are read step by step
        if not hasattr(self._dataset, "batch") or self._share.steps == 0:
            return 1
        arrays, _ = self._fetch(np.zeros(1, np.int64), None)
        sample_bytes = sum(array.nbytes for array in arrays.values())
        plan = self._share.plan
        step_bytes = max(1, sample_bytes * plan.micro_batch * plan.accumulate)
        return max(1, min(_STEPS_PER_READ, _BYTES_PER_READ // step_bytes))


class Feed:
    """The batches of one worker in order, read ahead by background threads.

    A context manager: leaving it stops the threads. What the data set raises while it is read
    ahead is raised where the batch is taken.

    Args:
        reader: what reads.
        threads: background threads; as many as there are reader processes, where there are.
        tell: is given each sample that could not be read, when its batch is taken.
    """

    def __init__(
        self, reader: Reader, threads: int, tell: Callable[[BadSample], None] = lambda _: None
    ) -> None:
        grain = _import_grain()
        source = grain.MapDataset.source(reader)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads + 2)
        self._reads = iter(source.to_iter_dataset(options))
        self._tell = tell
        self._bad = 0
        self._waited_seconds = 0.0

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self._reads.close()

    def __iter__(self) -> Iterator[HostBatch]:
        while True:
            asked_seconds = time.perf_counter()
            batches = next(self._reads, None)
            self._waited_seconds += time.perf_counter() - asked_seconds
            if batches is None:
                return
            for batch in batches:
                self._bad += len(batch.bad)
                for sample in batch.bad:
                    self._tell(sample)
                yield batch

    def take_notes(self) -> tuple[int, float]:
        """Give how many samples could not be read, and the seconds waited, since this was last called.

        Waits are given from a millisecond on, added up: told to the other workers, they cost something.
        """
        if not self._bad and self._waited_seconds < _TOLD_SECONDS:
            return 0, 0.0
        notes = self._bad, self._waited_seconds
        self._bad, self._waited_seconds = 0, 0.0
        return notes


def _import_grain() -> Any:
    """Import grain without its warning that JAX's profiler is missing, which nobody asked for."""
    from absl import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        import grain
    finally:
        logging.set_verbosity(verbosity)
    return grain
