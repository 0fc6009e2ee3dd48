"""The forward and backward passes of a stage in PyTorch."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.pipeline.checks import several_calls
from hvdtrain.backends.pipeline.groups import Layout
from hvdtrain.backends.pipeline.messages import Message
from hvdtrain.backends.torch.batches import TorchBatch
from hvdtrain.backends.torch.computation import Computation
from hvdtrain.backends.torch.objective.losses import Values
from hvdtrain.backends.torch.precision import autocast
from hvdtrain.backends.torch.stages.model import (
    Called,
    call_of,
    copies,
    float_tensors,
    form_of,
    from_message,
    to_message,
)
from hvdtrain.data.order import mix
from hvdtrain.workers.seeding import (
    host_generators,
    random_state_kept,
    restore_host_generators,
)

# a buffer that a forward pass has moved: the mapping that has it, its name and its values before
_Moved = tuple[dict[str, torch.Tensor | None], str, torch.Tensor]


@dataclass(frozen=True)
class _Kept:
    """What the backward pass of a micro-batch needs to compute its forward pass again."""

    received: Message | None  # what the stage was given; None in the first stage
    moved: Sequence[_Moved]  # the buffers that the forward pass has moved
    generators: tuple[Any, Any]  # the state of the generators of Python and numpy before it


class StagePasses:
    """What a worker computes of the micro-batches of a step.

    Between its forward and its backward pass, a micro-batch takes the memory of what the stage was given: the
    backward pass computes the forward pass again, from the same buffers, such as the statistics of batch
    norm, and with the same random numbers. Buffers move once, in the forward pass.

    Args:
        computation: what steps compute; its model has the blocks of this worker's stage.
        layout: the place of this worker.
        whole: the model that the stage is of.
        update: the update of the stage.

    Attributes:
        place: the micro-batch that ``evaluate`` computes next.
        sums: what the micro-batches add up to in the last stage: the weighted sums of loss and metrics.
        last_values: the rows of loss and metrics of the last micro-batch, and its weights.
    """

    def __init__(self, computation: Computation, layout: Layout, whole: torch.nn.Module, update: Any) -> None:
        self._computation, self._layout, self._update = computation, layout, update
        self._form, self._whole = form_of(whole), whole
        # a loss of the task's own may draw random numbers before it calls the model
        self._loss_may_draw = not computation.is_one_call
        self._batch: TorchBatch | None = None
        self._kept: dict[int, _Kept] = {}
        self.place = 0
        self.sums: torch.Tensor | None = None
        self.last_values: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, batch: TorchBatch, training: bool) -> None:
        """Begin a step.

        Args:
            batch: its batch.
            training: whether the loss is that of training.
        """
        self._batch, self.place, self.sums, self.last_values = batch, 0, None, None
        self._kept.clear()
        computation = self._computation
        computation.enter_mode(training)
        self._objective = computation.train_objective if training else computation.eval_objective

    def samples(self, place: int) -> int:
        """Return the number of samples that are computed of a micro-batch, which has no padding."""
        return len(self._counted(place)[1])

    def forward(self, place: int, received: Message | None) -> Message:
        """Compute the outputs for a micro-batch; keep what the stage was given."""
        generators = host_generators()
        with torch.no_grad():
            before = [
                (module._buffers, name, buffer, buffer.clone())
                for module in self._computation.model.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
            message = to_message(self._computed(place, self._call(place, received)))
            moved = [
                (holder, name, value)
                for holder, name, buffer, value in before
                if holder.get(name) is not buffer or not torch.equal(buffer, value)
            ]
        self._kept[place] = _Kept(received, moved, generators)
        return message

    def backward(self, place: int, received: Message) -> Message | None:
        """Add a micro-batch's part to the gradients; return the gradients of what the stage was given."""
        kept = self._kept.pop(place)
        with _as_before(kept):
            arguments, named = self._call(place, kept.received)
            leaves = self._leaves(arguments)
            outputs = float_tensors(self._computed(place, (arguments, named)))
        gradients = from_message(received, self._computation.device)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]

        def run() -> None:
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

        self._update.differentiate(run)
        return self._gradients_of(leaves)

    def compute_loss(self, place: int, received: Message | None) -> Message | None:
        """Do both passes of a micro-batch in the last stage."""
        arguments, _ = self._call(place, received)
        leaves = self._leaves(arguments)
        weights, gradient_weights = self._counted(place)[1:]
        update = self._update
        losses, own, rows = self._values(place, arguments)
        scaled = update.scale(gradient_weights)
        update.backward(losses, scaled if own is None else scaled * own)
        self._add(rows.detach(), weights)
        return self._gradients_of(leaves)

    def evaluate(self, received: Message | None) -> Message | None:
        """Compute the outputs for a micro-batch; in the last stage, the metrics."""
        place, self.place = self.place, self.place + 1
        with torch.no_grad():
            arguments, named = self._call(place, received)
            if not self._layout.is_last:
                return to_message(self._computed(place, (arguments, named)))
            self._add(self._values(place, arguments).rows, self._counted(place)[1])
        return None

    def taken(self) -> Any:
        """Return what the last micro-batch gave to metrics of a whole evaluation, in the last stage."""
        return self._computation.evaluation.take()

    def _call(self, place: int, received: Message | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the stage is called with."""
        if received is not None:
            return (from_message(received, self._computation.device),), {}
        with self._drawing_alike(place):
            return call_of(self._objective, self._counted(place)[0], self._form, self._whole)

    def _computed(self, place: int, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return the outputs of the stage."""
        computation = self._computation
        computation.batch_norm.weights = self._counted(place)[1]
        self._seed(place)
        with autocast(computation.precision, computation.device):
            return computation.model(*copies(call[0]), **copies(call[1]))

    def _values(self, place: int, arguments: tuple[Any, ...]) -> Values:
        """Return losses and values of the samples of a micro-batch, in the last stage."""
        computation, calls = self._computation, list[Any]()
        micro_batch, weights, _ = self._counted(place)
        computation.batch_norm.weights = weights

        def run(*_: Any, **__: Any) -> Any:
            calls.append(None)
            if len(calls) > 1:
                raise several_calls()
            self._seed(place)
            return computation.model(*copies(arguments))

        with self._drawing_alike(place), autocast(computation.precision, computation.device):
            losses, metrics = self._objective(Called(run, self._form, self._whole), micro_batch)
        return computation.values({"loss": losses, **metrics}, len(weights))

    def _add(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        self.last_values = rows, weights
        sums = torch.mv(rows, weights)
        self.sums = sums if self.sums is None else self.sums + sums

    def _counted(self, place: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        assert self._batch is not None  # a step has begun
        return self._batch.counted(place)

    def _seed(self, place: int) -> None:
        """Seed what a micro-batch draws, so that its backward pass draws the same as its forward pass."""
        assert self._batch is not None
        self._computation.seed_step(self._batch.step, place)

    @contextmanager
    def _drawing_alike(self, place: int) -> Iterator[None]:
        """Return a context in which a task's loss draws the same in the first stage as in the last.

        The first one computes it up to the call of the model, and the last one all of it.
        """
        if not self._loss_may_draw:
            yield
            return
        assert self._batch is not None
        first = self._layout.ranks_of_replica()[0]
        seed = mix(self._computation.config.seed, self._batch.step, first, place, 1) >> 1
        with random_state_kept():
            self._computation.seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            yield

    def _leaves(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that a stage was given whose gradients the stage before needs."""
        if self._layout.is_first:
            return []
        return [tensor.requires_grad_() for tensor in float_tensors(list(arguments))]

    def _gradients_of(self, leaves: Sequence[torch.Tensor]) -> Message | None:
        return None if self._layout.is_first else to_message([leaf.grad for leaf in leaves])


@contextmanager
def _as_before(kept: _Kept) -> Iterator[None]:
    """Return a context in which buffers and generators are as they were before a forward pass."""
    now = [(holder, name, holder.get(name)) for holder, name, _ in kept.moved]
    for holder, name, value in kept.moved:
        holder[name] = value
    try:
        with random_state_kept():
            restore_host_generators(kept.generators)
            yield
    finally:
        for holder, name, buffer in now:
            holder[name] = buffer
