"""Batches of a stream whose shards are dealt to the workers, which agree on the samples of each step."""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.data.feed import HostBatch
from hvdtrain.data.read_ahead import read_ahead
from hvdtrain.data.stream_part import STEPS, Item, StreamPart, Undecoded
from hvdtrain.workers.activity import ACTIVITY

# collective: the values of all workers in the order of ranks
Exchange = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class _Chunk:
    """Samples of a worker's shards that were read together; ``ends`` if the pass has no more of them."""

    items: list[Item]
    ends: bool


def _chunks(part: StreamPart, size: int) -> Iterator[_Chunk]:
    """Yield what a worker's shards hold, in chunks, in the thread that reads."""
    epoch, skipped = part.begin
    # each step took at most one global batch, so this many of this worker's samples were consumed at least
    undecoded = (
        skipped // part.plan.global_batch * int(part.plan.part(part.rank, part.plan.global_batch)[1].sum())
    )
    while True:
        items = enumerate(part.items(epoch, dealt=True))
        while True:
            chunk = [
                (
                    number * part.plan.workers + part.rank,
                    Undecoded(item) if number < undecoded else part.stream.decoded(item),
                )
                for number, item in itertools.islice(items, size)
            ]
            yield _Chunk(chunk, ends=len(chunk) < size)
            if len(chunk) < size:
                break
        if not part.is_training:
            return
        epoch, undecoded = epoch + 1, 0


class _Dealer:
    """The part of a worker that reads shards of its own, in steps on which the workers agree.

    Before every few steps each worker says how many samples it has for them and whether its shards end. So
    all know how many samples each step has, and a worker without any has padding until all shards have ended.
    """

    def __init__(self, part: StreamPart, exchange: Exchange, chunks: Iterator[_Chunk]) -> None:
        self._part, self._exchange, self._chunks = part, exchange, chunks
        plan = part.plan
        self._full = [int(plan.part(rank, plan.global_batch)[1].sum()) for rank in range(plan.workers)]
        self._queue: deque[Item] = deque()
        self._ends = False
        self._step = self._done = 0
        self._left = part.most
        # what this worker consumed last in the pass, as padding needs it: also after a resume
        self._last: deque[Item] = deque(maxlen=plan.micro_batch * plan.accumulate)
        _, self._skipped = part.begin

    @property
    def is_done(self) -> bool:
        """Whether training has consumed all that it is to consume."""
        return not self._left or self._step == self._part.most_steps

    def pass_over(self, epoch: int) -> Iterator[list[HostBatch]]:
        """Yield the batches of a pass; those of several steps together."""
        self._ends, found = False, 0
        self._last.clear()
        while not self.is_done:
            have, all_end = self._agree()
            batches = []
            for _ in range(STEPS):
                counts = self._counts(have)
                if not sum(counts) or self.is_done:
                    break
                have = [before - count for before, count in zip(have, counts, strict=True)]
                found += sum(counts)
                self._part.check_length(epoch, found)
                batches += self._take(counts)
            is_over = all_end and not any(have)
            if is_over:
                self._part.check_pass(epoch, found)
            elif self.is_done:
                self._check_end(epoch, found, have)
            if batches:
                yield batches
            if is_over:
                return

    def _check_end(self, epoch: int, found: int, have: list[int]) -> None:
        """Collective. Where training ends with the declared length, check that the pass ends there, too."""
        if found == self._part.stream.length:
            if not any(have):
                have, _ = self._agree()
            self._part.check_length(epoch, found + sum(have))

    def _agree(self) -> tuple[list[int], bool]:
        """Collective. Return how many samples each worker has for the next steps, and whether all end."""
        most = STEPS * self._full[self._part.rank]
        while len(self._queue) < most and not self._ends:
            chunk = next(self._chunks)
            self._queue.extend(chunk.items)
            self._ends = chunk.ends
        ACTIVITY.progress()
        everyone = self._exchange((min(len(self._queue), most), self._ends and len(self._queue) <= most))
        return [have for have, _ in everyone], all(ends for _, ends in everyone)

    def _counts(self, have: list[int]) -> list[int]:
        """Return how many samples each worker has in the next step."""
        plan, most = self._part.plan, self._skipped or self._left
        limits = [min(share, found) for share, found in zip(self._full, have, strict=True)]
        if sum(limits) <= most:
            return limits
        shares = [int(plan.part(rank, most)[1].sum()) for rank in range(plan.workers)]
        counts = [min(share, limit) for share, limit in zip(shares, limits, strict=True)]
        for rank, limit in enumerate(limits):  # in place of those that have less than their share
            counts[rank] += min(limit - counts[rank], most - sum(counts))
        return counts

    def _take(self, counts: list[int]) -> list[HostBatch]:
        """Consume this worker's samples of a step; return its batch, or nothing if it was done before."""
        part, total = self._part, sum(counts)
        own = [self._queue.popleft() for _ in range(counts[part.rank])]
        if self._skipped:
            self._skipped -= total
            self._last.extend(own)
            return []
        _, real = part.plan.part(part.rank, part.plan.global_batch)
        real = real & (np.cumsum(real.reshape(-1)) <= len(own)).reshape(real.shape)
        batch = part.host_batch(self._step, self._done, own, real, total, before=self._last)
        self._last.extend(own)
        self._step, self._done, self._left = self._step + 1, self._done + total, self._left - total
        return [batch]


def dealt(part: StreamPart, exchange: Exchange) -> Generator[list[HostBatch], None, None]:
    """Yield the batches of a worker that reads shards of its own."""
    chunks = _chunks(part, STEPS * part.plan.micro_batch * part.plan.accumulate)
    reads = read_ahead(lambda _: next(chunks, None), sys.maxsize, 1)
    dealer = _Dealer(part, exchange, (chunk for chunk in reads if chunk is not None))
    epoch, _ = part.begin
    try:
        for number in itertools.count(epoch):
            yield from dealer.pass_over(number)
            if not part.is_training or dealer.is_done:
                return
    finally:
        reads.close()
