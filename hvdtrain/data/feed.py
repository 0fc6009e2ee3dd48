"""The batches of one worker: which samples are in them, and reading them ahead in the background."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.order import BatchPlan, ShuffledOrder
from hvdtrain.data.readers import BadSample, Fetch, LocalFetch
from hvdtrain.task import Arrays

T = TypeVar("T")

# when the results are no longer needed, reads that have begun may take this long to finish
_CLOSE_SECONDS = 1.0


def read_ahead(read: Callable[[int], T], count: int, threads: int) -> Generator[T, None, None]:
    """Yield ``read(0)``, ``read(1)``, ..., ``read(count - 1)``, computed ahead by background threads.

    At most ``threads + 2`` results beyond the one that was yielded last are computed or kept. An exception
    takes the place of its result. A read that never returns does not block closing the generator.
    """
    executor = ThreadPoolExecutor(threads, thread_name_prefix="hvdtrain-read-ahead")
    pending: deque[Future[T]] = deque()
    try:
        for index in range(count):
            pending.append(executor.submit(read, index))
            if len(pending) > threads + 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        wait([future for future in pending if not future.cancelled()], _CLOSE_SECONDS)


# Samples of a data set with ``batch`` are read for several steps at once, so that passing results
# between threads does not slow short steps down: at most this many steps and bytes.
_STEPS_PER_READ = 64
_BYTES_PER_READ = 1 << 17
_LEAST_REPORTED_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One worker's samples of one step, in host memory."""

    step: int  # number of the step, from 0
    arrays: Arrays  # name to array (accumulate, micro_batch, ...)
    # (accumulate, micro_batch) of float32; 0 for padding. All full steps share one array
    weights: NDArray[np.float32]
    total_weight: float  # sum of the weights over all workers
    indices: NDArray[np.int64]  # (accumulate, micro_batch), the samples' indices in the data set
    bad: tuple[BadSample, ...] = ()  # the samples, apart from padding, that could not be read
    # samples of the range of the stream that is read: of an evaluation, all of its data. 0 if it is not known
    range_samples: int = 0
    in_warmup: bool = False  # whether the step begins while the learning rate is still rising to its peak

    def rows(self, places: Sequence[int]) -> "HostBatch":
        """Return some samples of the first micro-batch as a batch of its own."""
        chosen = slice(1), list(places)
        arrays = {name: array[chosen] for name, array in self.arrays.items()}
        return replace(
            self, arrays=arrays, weights=self.weights[chosen], indices=self.indices[chosen], bad=()
        )


@dataclass(frozen=True)
class Shard:
    """The shard of one worker: its part of every step in a range of the stream."""

    plan: BatchPlan  # how a global batch is sharded
    rank: int
    first_step: int  # number of the first step
    first_sample: int  # position in the stream at which the first step begins
    last_sample: int  # position at which the range ends; the last step is padded to full size
    warmup_samples: float = 0.0  # position at which the warm-up of the learning rate ends

    @property
    def steps(self) -> int:
        """Number of steps in the range."""
        return math.ceil((self.last_sample - self.first_sample) / self.plan.global_batch)

    def positions(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:
        """Return positions, weights and the global number of samples of a step, which counts from 0."""
        start = self.first_sample + step * self.plan.global_batch
        count = min(self.plan.global_batch, self.last_sample - start)
        places, weights = self._full if count == self.plan.global_batch else self._part(count)
        return start + places, weights, count

    def begins_in_warmup(self, step: int) -> bool:
        """Return whether a step begins in the warm-up; its number is within the range, from 0."""
        return self.first_sample + step * self.plan.global_batch < self.warmup_samples

    @cached_property
    def _full(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self._part(self.plan.global_batch)

    def _part(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        places, real = self.plan.part(self.rank, count)
        return places, real.astype(np.float32)


class Reader:
    """Reads one worker's batches; ``reader[k]`` is the list of batches of the k-th read."""

    def __init__(
        self, dataset: Any, order: ShuffledOrder | None, shard: Shard, fetch: Fetch | None = None
    ) -> None:
        self._dataset = dataset
        self._order = order  # of training; None: that of the data set, as in an evaluation
        self._shard = shard
        self._fetch = fetch or LocalFetch(dataset)
        self._steps_per_read = 1  # samples that are fetched one by one may be slow
        if hasattr(dataset, "batch") and shard.steps:
            arrays, _ = self._fetch(np.zeros(1, np.int64), None)
            sample_bytes = sum(array.nbytes for array in arrays.values())
            step_bytes = max(1, sample_bytes * shard.plan.micro_batch * shard.plan.accumulate)
            self._steps_per_read = max(1, min(_STEPS_PER_READ, _BYTES_PER_READ // step_bytes))

    def __len__(self) -> int:
        return math.ceil(self._shard.steps / self._steps_per_read)

    def __getitem__(self, read: int) -> list[HostBatch]:
        first = read * self._steps_per_read
        steps = range(first, min(first + self._steps_per_read, self._shard.steps))
        parts = [self._shard.positions(step) for step in steps]
        positions = np.stack([positions for positions, _, _ in parts])
        indices, keys = positions, None
        if self._order is not None:
            indices = self._order.indices(positions)
            if hasattr(self._dataset, "augmented"):
                keys = self._order.keys(positions, indices).reshape(-1)
        arrays, bad = self._fetch(indices.reshape(-1), keys)
        shaped = {name: a.reshape(indices.shape + a.shape[1:]) for name, a in arrays.items()}
        batches = [
            HostBatch(
                step=self._shard.first_step + step,
                arrays={name: array[i] for name, array in shaped.items()},
                weights=weights,
                total_weight=float(count),
                indices=indices[i],
                range_samples=self._shard.last_sample - self._shard.first_sample,
                in_warmup=self._shard.begins_in_warmup(step),
            )
            for i, (step, (_, weights, count)) in enumerate(zip(steps, parts, strict=True))
        ]
        for sample in bad:  # they could not be read: training has others in their place, evaluation none
            step, place = divmod(sample.place, batches[0].indices.size)
            batch = batches[step]
            if batch.weights.flat[place] == 0:
                continue  # padding
            weights, indices = batch.weights, batch.indices.copy()
            if self._order is not None:
                indices.flat[place] = sample.replacement_index
            else:
                weights = weights.copy()  # other steps share the array
                weights.flat[place] = 0
            batches[step] = replace(batch, weights=weights, indices=indices, bad=(*batch.bad, sample))
        return batches


class Feed:
    """The batches of one worker in order, read ahead by background threads."""

    def __init__(
        self,
        reads: Generator[list[HostBatch], None, None],
        on_bad_sample: Callable[[BadSample], None] = lambda _: None,
    ) -> None:
        self._reads, self._on_bad_sample = reads, on_bad_sample
        self._bad: dict[int, int] = {}  # by the batch's step
        self._waited_seconds = 0.0

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self._reads.close()

    def __iter__(self) -> Iterator[HostBatch]:
        while True:
            begun_seconds = time.perf_counter()
            batches = next(self._reads, None)
            self._waited_seconds += time.perf_counter() - begun_seconds
            if batches is None:
                return
            for batch in batches:
                if batch.bad:
                    self._bad[batch.step] = len(batch.bad)
                for sample in batch.bad:
                    self._on_bad_sample(sample)
                yield batch

    def take_notes(self, step: int | None = None) -> tuple[int, float]:
        """Return the number of samples that could not be read and the seconds waited since the last call."""
        steps = [number for number in self._bad if step is None or number <= step]
        if not steps and self._waited_seconds < _LEAST_REPORTED_SECONDS:
            return 0, 0.0
        notes = sum(self._bad.pop(number) for number in steps), self._waited_seconds
        self._waited_seconds = 0.0
        return notes
