"""The forward and backward passes of a stage in PyTorch."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.backends.pipeline.messages import Message
from hvdtrain.backends.pipeline.staged import several_calls
from hvdtrain.backends.torch.batches import TorchBatch
from hvdtrain.backends.torch.precision import autocast
from hvdtrain.backends.torch.stage_messages import float_tensors, from_message, to_message
from hvdtrain.backends.torch.stage_model import Called, call_of
from hvdtrain.data.order import mix

if TYPE_CHECKING:
    from hvdtrain.backends.torch.staged_backend import TorchStagedBackend


class StagePasses:
    """What a worker computes of the micro-batches of a step.

    Between its forward and its backward pass, a micro-batch takes the memory of what the stage was given: the
    backward pass computes the forward pass again. What that moves, such as the statistics of batch norm,
    moves once, in the backward pass.

    Args:
        backend: the backend of the stage.
        signature: that of the model's call.

    Attributes:
        place: the micro-batch that ``evaluate`` computes next.
        sums: what the micro-batches add up to in the last stage: the weighted sums of loss and metrics.
        last_values: the rows of loss and metrics of the last micro-batch, and its weights.
    """

    def __init__(self, backend: "TorchStagedBackend", signature: inspect.Signature | None) -> None:
        self._backend = backend
        self._signature = signature
        self._batch: TorchBatch | None = None
        self._kept: dict[int, Message | None] = {}
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
        self._objective = self._backend._train_objective if training else self._backend._eval_objective

    def samples(self, place: int) -> int:
        """Return the number of samples that are computed of a micro-batch, which has no padding."""
        return len(self._counted(place)[1])

    def forward(self, place: int, received: Message | None) -> Message:
        """Compute the outputs for a micro-batch; keep what the stage was given."""
        self._kept[place] = received
        with torch.no_grad(), self._buffers_kept():
            return to_message(self._computed(place, self._call(place, received)))

    def backward(self, place: int, received: Message) -> Message | None:
        """Add a micro-batch's part to the gradients; return the gradients of what the stage was given."""
        arguments, named = self._call(place, self._kept.pop(place))
        leaves = self._leaves(arguments)
        outputs = float_tensors(self._computed(place, (arguments, named)))
        gradients = from_message(received, self._backend._device)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]

        def run() -> None:
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

        self._backend._update.differentiate(run)
        return self._gradients_of(leaves)

    def compute_loss(self, place: int, received: Message | None) -> Message | None:
        """Do both passes of a micro-batch in the last stage."""
        arguments, _ = self._call(place, received)
        leaves = self._leaves(arguments)
        weights, gradient_weights = self._counted(place)[1:]
        update = self._backend._update
        losses, own, rows = self._values(place, arguments)
        scaled = update.scale(gradient_weights)
        update.backward(losses, scaled if own is None else scaled * own)
        self._add(rows.detach(), weights)
        return self._gradients_of(leaves)

    def evaluate(self, received: Message | None) -> Message | None:
        """Compute the outputs for a micro-batch; in the last stage, the metrics."""
        place, self.place = self.place, self.place + 1
        arguments, named = self._call(place, received)
        if not self._backend.layout.is_last:
            return to_message(self._computed(place, (arguments, named)))
        self._add(self._values(place, arguments).rows, self._counted(place)[1])
        return None

    def _call(self, place: int, received: Message | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the stage is called with."""
        if received is not None:
            return (from_message(received, self._backend._device),), {}
        return call_of(self._objective, self._counted(place)[0], self._signature)

    def _computed(self, place: int, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return the outputs of the stage."""
        backend = self._backend
        backend._batch_norm.weights = self._counted(place)[1]
        self._seed(place)
        with autocast(backend._precision, backend._device):
            return backend.model(*call[0], **call[1])

    def _values(self, place: int, arguments: tuple[Any, ...]) -> Any:
        """Return losses and values of the samples of a micro-batch, in the last stage."""
        backend, calls = self._backend, list[Any]()
        micro_batch, weights, _ = self._counted(place)
        backend._batch_norm.weights = weights
        self._seed(place)

        def run(*_: Any, **__: Any) -> Any:
            calls.append(None)
            if len(calls) > 1:
                raise several_calls()
            return backend.model(*arguments)

        with autocast(backend._precision, backend._device):
            losses, metrics = self._objective(Called(run, self._signature), micro_batch)
        return backend._values({"loss": losses, **metrics}, len(weights))

    def _add(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        self.last_values = rows, weights
        sums = torch.mv(rows, weights)
        self.sums = sums if self.sums is None else self.sums + sums

    def _counted(self, place: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        assert self._batch is not None  # a step has begun
        return self._batch.counted(place)

    def _seed(self, place: int) -> None:
        """Seed what a micro-batch draws, so that its backward pass draws the same as its forward pass."""
        backend = self._backend
        assert self._batch is not None
        seed = mix(backend._seed, self._batch.step, backend.workers.rank, place) >> 1
        if backend._device.type == "cuda":
            torch.cuda.default_generators[backend._device.index].manual_seed(seed)
        torch.default_generator.manual_seed(seed)

    def _leaves(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that a stage was given whose gradients the stage before needs."""
        if self._backend.layout.is_first:
            return []
        return [tensor.requires_grad_() for tensor in float_tensors(list(arguments))]

    def _gradients_of(self, leaves: Sequence[torch.Tensor]) -> Message | None:
        return None if self._backend.layout.is_first else to_message([leaf.grad for leaf in leaves])

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Return a context after which the buffers of the stage are as they were."""
        before = [(buffer, buffer.clone()) for buffer in self._backend.model.buffers()]
        try:
            yield
        finally:
            for buffer, value in before:
                buffer.copy_(value)
