"""What PyTorch's steps take, and give: batches on the device, totals on their way from it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hvdtrain.backends.base import Totals


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """One worker's part of one step on its device.

    Attributes:
        step: the step, counted from 0.
        micro_batches: a mapping of names to tensors (micro_batch, ...) for each.
        weights: for each micro-batch, (micro_batch,).
        gradient_weights: likewise: each sample's part in the mean gradient, times the number of
            workers, as Horovod averages over them.
        total_weight: sum of the weights over all workers.
    """

    step: int
    micro_batches: list[dict[str, torch.Tensor]]
    weights: list[torch.Tensor]
    gradient_weights: list[torch.Tensor]
    total_weight: float

    def tensors(self) -> Iterator[torch.Tensor]:
        """Give everything that lies on the device."""
        yield from self.weights
        yield from self.gradient_weights
        for micro_batch in self.micro_batches:
            yield from micro_batch.values()


class TorchPending:
    """Totals on their way from the device."""

    def __init__(self, names: tuple[str, ...], sums: torch.Tensor, weight: float) -> None:
        self._names = names
        self._weight = weight
        self._event: torch.cuda.Event | None = None
        if sums.is_cuda:
            # only a copy into pinned memory lets the host go on
            self._sums = torch.empty(sums.shape, pin_memory=True).copy_(sums, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._sums = sums

    def read(self) -> Totals:
        """Wait for the device if need be and give the totals."""
        if self._event is not None:
            self._event.synchronize()
        return Totals.from_vector(self._names, self._sums.tolist(), self._weight)
