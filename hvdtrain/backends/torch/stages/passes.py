"""The forward and backward passes of a stage in PyTorch."""

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.backends.pipeline.messages import Message
from hvdtrain.backends.pipeline.pipeline import Call, StagePassesBase
from hvdtrain.backends.torch.objective.losses import Values
from hvdtrain.backends.torch.precision import autocast
from hvdtrain.backends.torch.stages.model import (
    copies,
    float_tensors,
    from_message,
    to_message,
)


class StagePasses(StagePassesBase):
    """What a worker computes of the micro-batches of a step."""

    def received(self, message: Message) -> Any:
        """Return the tensors of a message."""
        return from_message(message, self._computation.device)

    def begin(self, batch: Any, training: bool) -> None:
        """Begin a step, or the evaluation of a batch."""
        super().begin(batch, training)
        self._computation.enter_mode(training)

    def forward(self, place: int, received: Message | None) -> Message:
        """Compute the outputs for a micro-batch, and keep them with what the stage was given."""
        call = self._call(place, received)
        leaves = self._leaves(call)
        outputs = self._computed(place, call)
        self._kept[place] = leaves, float_tensors(outputs)
        return to_message(outputs)

    def backward(self, place: int, received: Message) -> Message | None:
        """Add a micro-batch's part to the gradients; return the gradients of what the stage was given."""
        leaves, outputs = self._kept.pop(place)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, self.received(received), strict=True)
            if output.requires_grad and gradient is not None
        ]

        def run() -> None:
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

        self._update.differentiate(run)
        return self._gradients_of(leaves)

    def compute_loss(self, place: int, received: Message | None) -> Message | None:
        """Do both passes of a micro-batch in the last stage."""
        call = self._call(place, received)
        leaves = self._leaves(call)
        _, weights, gradient_weights = self._counted(place)
        losses, own, rows = self._values(place, call)
        scaled = self._update.scale(gradient_weights)
        self._update.backward(losses, scaled if own is None else scaled * own)
        self._add(rows.detach(), weights, torch.mv(rows.detach(), weights))
        return self._gradients_of(leaves)

    def evaluate(self, place: int, received: Message | None) -> Message | None:
        """Compute the outputs for a micro-batch; in the last stage, the metrics."""
        with torch.no_grad():
            call = self._call(place, received)
            if not self._layout.is_last_stage:
                return to_message(self._computed(place, call))
            rows, weights = self._values(place, call).rows, self._counted(place)[1]
            self._add(rows, weights, torch.mv(rows, weights))
        return None

    def taken(self) -> Any:
        """Return what the last micro-batch gave to metrics of a whole evaluation, in the last stage."""
        return self._computation.evaluation.take()

    def _computed(self, place: int, call: Call) -> Any:
        """Return the outputs of the stage."""
        computation = self._computation
        computation.batch_norm.weights = self._counted(place)[1]
        computation.seed_step(self._batch.step, place)
        with autocast(computation.precision, computation.device):
            return computation.model(*copies(call[0]), **copies(call[1]))

    def _values(self, place: int, call: Call) -> Values:
        """Return losses and values of the samples of a micro-batch, in the last stage."""
        micro_batch, weights, _ = self._counted(place)
        self._called.run = lambda *_, **__: self._computed(place, call)
        with autocast(self._computation.precision, self._computation.device):
            losses, metrics = self._objective(self._called, micro_batch)
        values: Values = self._computation.values({"loss": losses, **metrics}, len(weights))
        return values

    def _counted(self, place: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        found: tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor] = self._batch.counted(place)
        return found

    def _leaves(self, call: Call) -> list[torch.Tensor]:
        """Return the tensors that a stage was given whose gradients the stage before needs."""
        if self._layout.is_first_stage:
            return []
        return [tensor.requires_grad_() for tensor in float_tensors(list(call[0]))]

    def _gradients_of(self, leaves: Sequence[torch.Tensor]) -> Message | None:
        return None if self._layout.is_first_stage else to_message([leaf.grad for leaf in leaves])
