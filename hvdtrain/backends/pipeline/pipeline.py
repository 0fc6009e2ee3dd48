"""A step of a split model: the passes of its micro-batches, with what they send and wait for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

from hvdtrain.backends.pipeline.groups import Layout
from hvdtrain.backends.pipeline.messages import MOST_UNSENT, Message, Messenger
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, HvdtrainError, TaskError
from hvdtrain.workers.agreement import Workers, run_on_rank_zero
from hvdtrain.workers.user_errors import where_raised

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
Pass = tuple[Literal["forward", "backward"], int]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Pass]:
    """Yield the passes of one stage: "forward" or "backward", and the micro-batch.

    A stage computes as many forward passes ahead as there are stages behind it, and from then on a backward
    pass after each forward pass. So it keeps the inputs of at most ``stages - stage`` micro-batches, however
    many there are.

    Source: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019; with
    the flush at the end of each step of "Memory-Efficient Pipeline-Parallel DNN Training", 2021.

    Args:
        stage: the stage, from 0.
        stages: number of stages.
        micro_batches: number of micro-batches of a step.
    """
    ahead = min(stages - stage - 1, micro_batches)
    for place in range(ahead):
        yield "forward", place
    for place in range(micro_batches):
        if place + ahead < micro_batches:
            yield "forward", place + ahead
        yield "backward", place


def bubble(stages: int, micro_batches: int) -> float:
    """Return the part of a step in which a stage waits, if all stages take equally long.

    A step takes as long as ``micro_batches + stages - 1`` passes of one stage, of which each stage computes
    ``micro_batches``.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def cut(costs: Sequence[float], stages: int, last_costs: Sequence[float] | None = None) -> list[int]:
    """Return the first block of each stage, so that the largest cost of a stage is as small as possible.

    Of several such divisions, the one is chosen whose stages before the last cost most: they are the first in
    the order of their first blocks from behind.

    Args:
        costs: of each block, such as the seconds that it takes.
        stages: number of stages; each has at least one block.
        last_costs: of each block if it is in the last stage; None if they are the same.

    Raises:
        TaskError: If there are fewer blocks than stages.
    """
    count = len(costs)
    check_enough(count, stages)
    sums = [0.0, *accumulate(costs)]
    last_sums = [0.0, *accumulate(costs if last_costs is None else last_costs)]
    # by the number of stages: the largest cost of a stage of the first blocks, and where the last one begins
    best = [[sums[end] for end in range(count + 1)]]
    begins = [[0] * (count + 1)]
    for used in range(1, stages):
        of_stage = last_sums if used == stages - 1 else sums
        row, begin_row = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(used + 1, count + 1):
            for begin in range(used, end):
                largest = max(best[used - 1][begin], of_stage[end] - of_stage[begin])
                if largest <= row[end]:
                    row[end], begin_row[end] = largest, begin
        best.append(row)
        begins.append(begin_row)
    firsts, end = [], count
    for used in range(stages - 1, -1, -1):
        begin = begins[used][end] if used else 0
        firsts.append(begin)
        end = begin
    return firsts[::-1]


def given_cuts(cuts: Sequence[int], blocks: int, stages: int) -> list[int]:
    """Return the first block of each stage as a config gives it.

    Args:
        cuts: the first block of each stage but the first.
        blocks: number of blocks.
        stages: number of stages.

    Raises:
        ConfigError: If they do not divide the blocks into stages of at least one block.
        TaskError: If there are fewer blocks than stages.
    """
    check_enough(blocks, stages)
    firsts = [0, *cuts]
    ends = [*cuts, blocks]
    if len(firsts) != stages or any(first >= end for first, end in zip(firsts, ends, strict=True)):
        raise ConfigError(
            f"stage_cuts {list(cuts)} does not divide {blocks} blocks into {stages} stages",
            f"Give {stages - 1} increasing numbers from 1 to {blocks - 1}: the first block of each stage but "
            "the first, blocks being counted from 0.",
            everywhere=True,
        )
    return firsts


def check_enough(blocks: int, stages: int) -> None:
    """Check that each stage can have a block.

    Raises:
        TaskError: If there are too few.
    """
    if blocks < stages:
        found = "one block" if blocks == 1 else f"{blocks} blocks"
        raise TaskError(
            f"the model has {found}, which cannot be divided into {stages} stages",
            f"Use --stages {blocks} or fewer, or let the task give more and smaller blocks."
            if blocks > 1
            else "Leave --stages out, or let the task give more and smaller blocks.",
            everywhere=True,
        )


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, and what a framework computes with them to divide them."""

    blocks: Sequence[Any]  # the blocks, in order
    # returns what the model is called with for a micro-batch; None if there is none, or if the parameters
    # have no values
    call: Callable[[], Call | None]
    # checks that the blocks compute what the model does, if that is not known; notes what differs
    check: Callable[[Call], None]
    # returns how long the forward pass of each block takes for a micro-batch, and both passes
    seconds: Callable[[Call], tuple[Sequence[float], Sequence[float]]]
    sizes: Callable[[], Sequence[float]]  # returns the bytes of each block's parameters

    def firsts(self, config: Config, workers: Workers) -> list[int]:
        """Collective. Return the first block of each stage, as rank 0 chooses them.

        Raises:
            ConfigError: If the config's own division does not fit.
            TaskError: If there are too few blocks, or they do not compute what the model does.
        """
        check_enough(len(self.blocks), config.stages)

        def choose() -> list[int]:
            try:
                return cuts()
            except HvdtrainError:
                raise
            except Exception as error:  # of the task's code
                where = where_raised(error, own_only=True)
                problem = f"the first batch of the training data fails in the model's blocks: {where}"
                remedy = "With stages, a block can use what the one before returns, and nothing else of it."
                raise TaskError(problem, remedy) from error

        def cuts() -> list[int]:
            call = self.call()
            if call is not None:
                self.check(call)
            if config.stage_cuts is not None:
                return given_cuts(config.stage_cuts, len(self.blocks), config.stages)
            if config.stage_balance == "memory" or call is None:
                return cut(self.sizes(), config.stages)
            forward, both = self.seconds(call)
            # all stages but the last compute each forward pass twice
            return cut([one + two for one, two in zip(forward, both, strict=True)], config.stages, both)

        return run_on_rank_zero(workers, choose, "measuring the blocks of the model")

    def of_stages(self, firsts: Sequence[int]) -> list[Sequence[Any]]:
        """Return the blocks of each stage.

        Args:
            firsts: the first block of each.
        """
        ends = [*firsts[1:], len(self.blocks)]
        return [self.blocks[first:end] for first, end in zip(firsts, ends, strict=True)]


class Stage(Protocol):
    """What a framework computes of a stage. A message is None where there is no neighbour."""

    def forward(self, place: int, received: Message | None) -> Message:
        """Compute the outputs for a micro-batch, and keep what its backward pass needs.

        Args:
            place: which micro-batch of the step.
            received: the outputs of the stage before.
        """
        ...

    def backward(self, place: int, received: Message) -> Message | None:
        """Add a micro-batch's part to the gradients; return the gradients of what ``forward`` received.

        Args:
            place: which micro-batch of the step.
            received: the gradients of the outputs.
        """
        ...

    def compute_loss(self, place: int, received: Message | None) -> Message | None:
        """Do both passes of a micro-batch in the last stage; return the gradients of what was received."""
        ...

    def evaluate(self, received: Message | None) -> Message | None:
        """Compute the outputs for a micro-batch without a gradient; in the last stage, the metrics."""
        ...


class Pipeline:
    """The pipeline that one worker has a stage of.

    Args:
        layout: the place of this worker.
        messenger: what passes messages between workers.

    Attributes:
        message_bytes: the size of the largest message of training so far.
    """

    def __init__(self, layout: Layout, messenger: Messenger) -> None:
        self.layout = layout
        self.messenger = messenger
        self.message_bytes = 0

    def train(self, stage: Stage, micro_batches: int) -> None:
        """Collective in the replica. Do the forward and backward passes of a step.

        Args:
            stage: this worker's.
            micro_batches: number of micro-batches of the step.
        """
        layout = self.layout
        waiting: dict[int, Message | None] = {}
        with self._told_of_failure():
            for what, place in one_forward_one_backward(layout.stage, layout.stages, micro_batches):
                if what == "forward":
                    received = self._noted(self._from_before())
                    if layout.is_last:
                        waiting[place] = received
                    else:
                        outputs = stage.forward(place, received)
                        self._noted(outputs)
                        self.messenger.send(outputs, layout.rank + 1)
                elif layout.is_last:
                    self._back(stage.compute_loss(place, waiting.pop(place)))
                else:
                    self._back(stage.backward(place, self.messenger.receive(layout.rank + 1)))
            self.messenger.flush()

    def evaluate(self, stage: Stage) -> None:
        """Evaluate one micro-batch; stages before the last may be several ahead.

        Args:
            stage: this worker's.
        """
        with self._told_of_failure():
            outputs = stage.evaluate(self._from_before())
            if outputs is not None:
                self.messenger.send(outputs, self.layout.rank + 1)

    def kept_bytes(self, micro_batches: int) -> int:
        """Return what messages take at most in a step, beyond those of a step with one micro-batch.

        They are what the stage was given for micro-batches that are under way, and what was sent and is kept
        until MPI has taken it.

        Args:
            micro_batches: number of micro-batches of the step.
        """
        layout = self.layout
        given = 0 if layout.is_first else min(layout.stages - layout.stage, micro_batches) - 1
        each = 2 - layout.is_first - layout.is_last
        sent = min(MOST_UNSENT, micro_batches * each) - each
        return self.message_bytes * (given + max(0, sent))

    def _noted(self, message: Message | None) -> Message | None:
        if message is not None:
            self.message_bytes = max(self.message_bytes, message.nbytes)
        return message

    def _from_before(self) -> Message | None:
        return None if self.layout.is_first else self.messenger.receive(self.layout.rank - 1)

    def _back(self, gradients: Message | None) -> None:
        if gradients is not None:
            self.messenger.send(gradients, self.layout.rank - 1)

    @contextmanager
    def _told_of_failure(self) -> Iterator[None]:
        """Return a context whose exceptions let the neighbouring stages know that this one ends."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, HvdtrainError):
                error.everywhere = False  # other stages compute something else, and do not say it
            rank, own = self.layout.rank, self.layout.ranks_of_replica()
            self.messenger.send_failure([one for one in (rank - 1, rank + 1) if one in own])
            raise
