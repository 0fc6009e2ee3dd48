"""A step of a split model: the passes of its micro-batches, with what they send and wait for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from hvdtrain.backends.pipeline.layout import Layout
from hvdtrain.backends.pipeline.messages import MOST_UNSENT, Message, Messenger
from hvdtrain.backends.pipeline.schedule import one_forward_one_backward
from hvdtrain.errors import HvdtrainError


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
