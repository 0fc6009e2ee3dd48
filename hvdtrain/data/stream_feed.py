"""The batches of one worker from a stream: of all of it, or of shards that are divided among the workers."""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.feed import Feed, HostBatch, read_ahead
from hvdtrain.data.order import BatchPlan
from hvdtrain.data.stream import Stream, Summary, Trace, are_alike
from hvdtrain.errors import DataError
from hvdtrain.workers.activity import ACTIVITY

STEPS = 4  # that are read, and agreed on by the workers, at once

# number of a sample in its pass and what the source gave, decoded or ``Undecoded``
Item = tuple[int, Any]


class Undecoded(NamedTuple):
    """What the source gave for a sample that was consumed before; it may still be padding."""

    item: Any


@dataclass(frozen=True)
class StreamPart:
    """What a worker reads of a stream."""

    stream: Stream
    plan: BatchPlan  # how a global batch is sharded
    rank: int
    seed: int = 0  # the job's
    first_step: int = 0  # number of the first step
    first_sample: int = 0  # samples that were consumed before it
    last_sample: int | None = None  # where training ends; None to read one pass, as an evaluation does
    last_step: int | None = None  # the step with which training ends at the latest
    # whether the learning rate is still rising, of the steps and samples before a step
    in_warmup: Callable[[int, int], bool] = lambda step, samples: False

    @property
    def is_training(self) -> bool:
        """Whether passes follow one another without end, shuffled."""
        return self.last_sample is not None

    @property
    def most(self) -> int:
        """Samples that are left to be consumed."""
        return sys.maxsize if self.last_sample is None else self.last_sample - self.first_sample

    @property
    def begin(self) -> tuple[int, int]:
        """The pass in which reading begins, and how many samples of the passes from there on are skipped."""
        if self.stream.length is None:
            return 0, self.first_sample
        return divmod(self.first_sample, self.stream.length)

    def check_length(self, epoch: int, found: int, is_whole: bool = False) -> None:
        """Check that a pass, of which so many samples were found, has as many as were declared."""
        length, over = self.stream.length, f"pass {epoch + 1} over the stream"
        if length is not None and found > length:
            raise DataError(
                f"{over} has more than the {length:,} samples that were declared",
                "Declare the number of samples of each pass. A source without an end has none: leave length "
                "out and give --steps, or end each pass with itertools.islice.",
            )
        if is_whole and found == 0:
            raise DataError(
                f"{over} gave no sample",
                "Each pass must begin anew: what can be passed over only once is given as a function.",
            )
        if is_whole and length is not None and found != length:
            raise DataError(
                f"{over} had {found:,} samples; {length:,} were declared",
                f"Write length={found} if every pass has as many, or leave it out and give --steps.",
            )
        if is_whole:
            self.stream.seen = found

    def host_batch(
        self,
        step: int,  # from 0 among those that are read
        done: int,  # samples that were consumed before it
        items: Sequence[Item],
        real: NDArray[np.bool_],  # (accumulate, micro_batch): which places the items have
        total: int,
        *,
        before: Sequence[Item] = (),  # this worker's samples before them
    ) -> HostBatch:
        """Return the batch of a step. Padding repeats this worker's last samples: batch norm counts it."""
        rows: list[Any] = [None] * real.size
        numbers = np.zeros(real.shape, np.int64)
        for place, (number, sample) in zip(np.flatnonzero(real), items, strict=True):
            rows[place], numbers.flat[place] = sample, number
        places = np.flatnonzero(~real)
        if len(places):
            pool = [*reversed(before), *reversed(items)][: len(places)]
            last = [sample for _, sample in pool] or [self.stream.first()]
            last = [self.stream.decoded(one.item) if isinstance(one, Undecoded) else one for one in last]
            for turn, place in enumerate(places):
                rows[place] = last[turn % len(last)]
        arrays = self.stream.batch_of(rows)
        return HostBatch(
            step=self.first_step + step,
            arrays={name: array.reshape(real.shape + array.shape[1:]) for name, array in arrays.items()},
            weights=real.astype(np.float32),
            total_weight=float(total),
            indices=numbers,
            in_warmup=self.in_warmup(self.first_step + step, self.first_sample + done),
        )


# collective: the values of all workers in the order of ranks
Exchange = Callable[[Any], list[Any]]
# samples of a worker's shards that were read together, and whether the pass has no more of them
_Chunk = tuple[list[Item], bool]


def _chunks(part: StreamPart, size: int) -> Iterator[_Chunk]:
    """Yield what a worker's shards hold, in chunks, in the thread that reads."""
    epoch, skipped = part.begin
    full = int(part.plan.part(part.rank, part.plan.global_batch)[1].sum())
    # each step took at most one global batch, so this many of this worker's samples were consumed at least
    undecoded = skipped // part.plan.global_batch * full
    while True:
        own = (part.rank, part.plan.workers)
        items, ends = enumerate(part.stream.items(epoch, part.seed, own, part.is_training)), False
        while not ends:
            chunk: list[Item] = []
            for number, item in itertools.islice(items, size):
                found = Undecoded(item) if number < undecoded else part.stream.decoded(item)
                chunk.append((number * part.plan.workers + part.rank, found))
            ends = len(chunk) < size
            yield chunk, ends
        if not part.is_training:
            return
        epoch, undecoded = epoch + 1, 0


class _OwnShards:
    """The part of a worker that reads shards of its own, in steps on which the workers agree.

    Before every few steps each worker says how many samples it has for them and whether its shards end. So
    all know how many samples each step has, and a worker without any has padding.
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
        return not self._left or self._part.first_step + self._step == self._part.last_step

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
                self._part.check_length(epoch, found, is_whole=True)
            elif self.is_done and found == self._part.stream.length:
                # where training ends with the declared length, the pass must end there, too
                more = have if any(have) else self._agree()[0]
                self._part.check_length(epoch, found + sum(more))
            if batches:
                yield batches
            if is_over:
                return

    def _agree(self) -> tuple[list[int], bool]:
        """Collective. Return how many samples each worker has for the next steps, and whether all end."""
        most = STEPS * self._full[self._part.rank]
        while len(self._queue) < most and not self._ends:
            items, self._ends = next(self._chunks)
            self._queue.extend(items)
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


def sharded(part: StreamPart, exchange: Exchange) -> Generator[list[HostBatch], None, None]:
    """Yield the batches of a worker that reads shards of its own."""
    chunks = _chunks(part, STEPS * part.plan.micro_batch * part.plan.accumulate)
    reads = read_ahead(lambda _: next(chunks, None), sys.maxsize, 1)
    reader = _OwnShards(part, exchange, (chunk for chunk in reads if chunk is not None))
    with closing(reads):
        for epoch in itertools.count(part.begin[0]):
            yield from reader.pass_over(epoch)
            if not part.is_training or reader.is_done:
                return


_READS_BETWEEN_CHECKS = 64

_Place = tuple[int, int, Summary]  # number of a pass, and of a sample in it, and what was read up to there


def feed_of(part: StreamPart, exchange: Exchange) -> Feed:
    """Return the batches of one worker from a stream, in order."""
    read = sharded if part.stream.is_dealt(part.plan.workers) else _whole
    return Feed(read(part, exchange))


def _whole(part: StreamPart, exchange: Exchange) -> Generator[list[HostBatch], None, None]:
    """Yield the batches of a worker that reads the whole stream and keeps its part of every step."""
    steps, last = _whole_steps(part), (0, 0, Trace().summary)
    reads = read_ahead(lambda _: list(itertools.islice(steps, STEPS)), sys.maxsize, 1)
    with closing(reads):
        for number, found in enumerate(reads, 1):
            if not found:
                _check_place(part, exchange, "end", last)
                return
            last = found[-1][1]
            yield [batch for batch, _ in found]
            if number % _READS_BETWEEN_CHECKS == 0:
                _check_place(part, exchange, "step", last)


def _check_place(part: StreamPart, exchange: Exchange, what: str, place: _Place) -> None:
    """Collective. Check that all workers are at one place of the stream and read the same before it."""
    if part.plan.workers == 1:
        return
    everyone = exchange((what, *place))
    if len({found[:3] for found in everyone}) > 1:
        places = [f"{end} at sample {number:,} of pass {epoch + 1}" for end, epoch, number, _ in everyone]
        problem = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(places[:4]))
    elif are_alike([summary for *_, summary in everyone]):
        return
    else:
        where = f"up to sample {place[1]:,} of pass {place[0] + 1}"
        problem = f"{where}, their samples or the order of them differ"
    raise DataError(
        f"the workers read different streams: {problem}",
        "Each pass must give every worker the same samples in one order: seed random orders and filters.",
        everywhere=True,
    )


def _whole_steps(part: StreamPart) -> Iterator[tuple[HostBatch, _Place]]:
    """Yield the batches of ``_whole`` one by one with where each ends, in the thread that reads."""
    items, left, done, trace = _all_items(part), part.most, 0, Trace()
    for step in itertools.count():
        taken = list(itertools.islice(items, min(part.plan.global_batch, left)))
        if not taken:
            return
        left -= len(taken)
        if not left:
            next(items, None)  # it looks whether the pass ends there, too
        if part.plan.workers > 1:
            for _, _, item in taken:
                trace.add(item)
        places, real = part.plan.part(part.rank, len(taken))
        own = [(taken[place][1], part.stream.decoded(taken[place][2])) for place in places[real]]
        batch = part.host_batch(step, done, own, real, len(taken))
        yield batch, (taken[-1][0], taken[-1][1], trace.summary)
        done += len(taken)


def _all_items(part: StreamPart) -> Iterator[tuple[int, int, Any]]:
    """Yield pass, number and item of what is to be read; to the pass's end if training should end there."""
    (epoch, skipped), left = part.begin, part.most
    while left:
        found = 0
        for item in part.stream.items(epoch, part.seed, None, part.is_training):
            found += 1
            part.check_length(epoch, found)
            if skipped:
                skipped -= 1
                continue
            yield epoch, found - 1, item
            left -= 1
            if not left and found != part.stream.length:
                return
        part.check_length(epoch, found, is_whole=True)
        epoch += 1
        if not part.is_training:
            return
