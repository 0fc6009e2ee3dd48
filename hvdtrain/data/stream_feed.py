"""The batches of one worker from a stream, read ahead by a background thread."""

import itertools
import sys
from collections.abc import Generator, Iterator
from typing import Any

from hvdtrain.data.feed import Feed, HostBatch, read_ahead
from hvdtrain.data.stream import Summary, Trace, are_alike
from hvdtrain.data.stream_sharding import STEPS, Exchange, StreamPart, sharded
from hvdtrain.errors import DataError

_READS_BETWEEN_CHECKS = 64

# number of a pass, and of a sample in it, and what was read up to there
_Place = tuple[int, int, Summary]


class StreamFeed(Feed):
    """The batches of one worker from a stream, in order; see :class:`Feed`.

    Args:
        part: what the worker reads.
        exchange: gathers a value of all workers; called in the thread that takes the batches.
    """

    def __init__(self, part: StreamPart, exchange: Exchange) -> None:
        read = sharded if part.stream.is_dealt(part.plan.workers) else _whole
        self._begin(read(part, exchange), lambda _: None)


def _whole(part: StreamPart, exchange: Exchange) -> Generator[list[HostBatch], None, None]:
    """Yield the batches of a worker that reads the whole stream and keeps its part of every step.

    Now and then, and at the end, the workers compare where they are and what they read: sources that differ
    would show nowhere.

    Raises:
        DataError: If they are not at the same place, or read other samples or another order.
    """
    steps, last = _whole_steps(part), (0, 0, Trace().summary)
    reads = read_ahead(lambda _: list(itertools.islice(steps, STEPS)), sys.maxsize, 1)
    try:
        for number, found in enumerate(reads, 1):
            if not found:
                _check_place(part, exchange, "end", last)
                return
            last = found[-1][1]
            yield [batch for batch, _ in found]
            if number % _READS_BETWEEN_CHECKS == 0:
                _check_place(part, exchange, "step", last)
    finally:
        reads.close()


def _check_place(part: StreamPart, exchange: Exchange, what: str, place: _Place) -> None:
    """Collective. Check that all workers are at one place of the stream and read the same before it."""
    if part.plan.workers == 1:
        return
    everyone = exchange((what, *place))
    if len({found[:3] for found in everyone}) > 1:
        places = [f"{what} at sample {number:,} of pass {epoch + 1}" for what, epoch, number, _ in everyone]
        problem = "; ".join([f"rank {rank}: {text}" for rank, text in enumerate(places)][:4])
    elif not are_alike([summary for *_, summary in everyone]):
        problem = (
            f"up to sample {place[1]:,} of pass {place[0] + 1}, their samples or the order of them differ"
        )
    else:
        return
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
        own = [taken[place] for place in places[real]]
        samples = [(number, part.stream.decoded(item)) for _, number, item in own]
        yield (
            part.host_batch(step, done, samples, real, len(taken)),
            (taken[-1][0], taken[-1][1], trace.summary),
        )
        done += len(taken)


def _all_items(part: StreamPart) -> Iterator[tuple[int, int, Any]]:
    """Yield pass, number and item of what is to be read, not decoded.

    The last pass is read to its end if training ends where it should end by the declared length.
    """
    (epoch, skipped), left = part.begin, part.most
    while left:
        found = 0
        for item in part.items(epoch, own_shards=False):
            found += 1
            part.check_length(epoch, found)
            if skipped:
                skipped -= 1
                continue
            yield epoch, found - 1, item
            left -= 1
            if not left and found != part.stream.length:
                return
        part.check_pass(epoch, found)
        epoch += 1
        if not part.is_training:
            return
