"""What a worker reads of a stream, and its batches."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import BatchPlan
from hvdtrain.data.stream import Stream
from hvdtrain.errors import DataError

STEPS = 4  # that are read, and agreed on by the workers, at once

# number of a sample in its pass and what the source gave, decoded or ``Undecoded``
Item = tuple[int, Any]


@dataclass(frozen=True)
class Undecoded:
    """What the source gave for a sample that was consumed before; it may still be padding."""

    item: Any


@dataclass(frozen=True)
class StreamPart:
    """What a worker reads of a stream.

    Args:
        stream: the stream.
        plan: how a global batch is sharded.
        rank: rank of the worker.
        seed: the job's seed.
        first_step: number of the first step.
        first_sample: samples that were consumed before it.
        last_sample: where training ends; None to read one pass, as an evaluation does.
        last_step: the step with which training ends at the latest.
        in_warmup: returns whether the learning rate is still rising, of the steps and samples before a step.
    """

    stream: Stream
    plan: BatchPlan
    rank: int
    seed: int = 0
    first_step: int = 0
    first_sample: int = 0
    last_sample: int | None = None
    last_step: int | None = None
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
    def most_steps(self) -> int:
        """Steps that are left to be done, at most."""
        return sys.maxsize if self.last_step is None else self.last_step - self.first_step

    @property
    def begin(self) -> tuple[int, int]:
        """The pass in which reading begins, and how many samples of the passes from there on are skipped."""
        if self.stream.length is None:
            return 0, self.first_sample
        return divmod(self.first_sample, self.stream.length)

    def items(self, epoch: int, dealt: bool) -> Iterator[Any]:
        """Return the samples of an epoch that this worker goes over, not decoded."""
        part = (self.rank, self.plan.workers) if dealt else None
        return self.stream.items(epoch, self.seed, part, self.is_training)

    def check_length(self, epoch: int, found: int) -> None:
        """Check that a pass has no more samples than were declared, as soon as so many are found.

        Raises:
            DataError: If it has more.
        """
        length = self.stream.length
        if length is not None and found > length:
            raise DataError(
                f"pass {epoch + 1} over the stream has more than the {length:,} samples that were declared",
                "Declare the number of samples of each pass. A source without an end has none: leave length "
                "out and give --steps, or end each pass with itertools.islice.",
            )

    def check_pass(self, epoch: int, found: int) -> None:
        """Check the number of samples of a whole pass, and remember it.

        Raises:
            DataError: If it is none, or not what was declared.
        """
        self.check_length(epoch, found)
        length = self.stream.length
        if found == 0:
            raise DataError(
                f"pass {epoch + 1} over the stream gave no sample",
                "Each pass must begin anew: what can be passed over only once is given as a function.",
            )
        if length is not None and found != length:
            raise DataError(
                f"pass {epoch + 1} over the stream had {found:,} samples; {length:,} were declared",
                f"Write length={found} if every pass has as many, or leave it out and give --steps.",
            )
        self.stream.seen = found

    def host_batch(
        self,
        step: int,
        done: int,
        items: Sequence[Item],
        real: NDArray[np.bool_],
        total: int,
        *,
        before: Sequence[Item] = (),
    ) -> HostBatch:
        """Return the batch of a step.

        Padding repeats the last samples of this worker in turn, first those before the step: batch norm
        counts it.

        Args:
            step: number of the step among those that are read, from 0.
            done: samples that were consumed in the steps before it.
            items: this worker's samples.
            real: (accumulate, micro_batch), which places they have; the others are padding.
            total: samples of all workers.
            before: samples that this worker consumed before them, the last one last.
        """
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
