"""What PyTorch's steps take, and return: batches on the device, metrics on their way from it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.backends.objective.stateful_metrics import Samples
from hvdtrain.backends.step_metrics import PendingVector
from hvdtrain.data.feed import HostBatch

Counted = tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]  # with weights and gradient weights


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """One worker's part of one step on its device."""

    step: int  # the step, counted from 0
    micro_batches: list[dict[str, torch.Tensor]]  # a mapping of names to tensors (micro_batch, ...) for each
    weights: list[torch.Tensor]  # for each micro-batch, (micro_batch,)
    # likewise: each sample's part in the mean gradient over the global batch
    gradient_weights: list[torch.Tensor]
    total_weight: float  # sum of the weights over all workers
    reduced_weight: float  # that over the workers whose gradients are summed: of a local step, this one's
    # for each micro-batch, which of its samples do not have weight 0; None if all or none
    counted_rows: list[torch.Tensor | None]
    samples: Samples  # which samples they are
    in_warmup: bool = False  # whether the step begins while the learning rate is still rising to its peak

    def counted(self, place: int, least: int = 1) -> Counted:
        """Return a micro-batch without padding, with its weights and gradient weights."""
        micro_batch, rows = self.micro_batches[place], self.counted_rows[place]
        weights, gradient_weights = self.weights[place], self.gradient_weights[place]
        if rows is None:
            return micro_batch, weights, gradient_weights
        used = rows if len(rows) >= least else rows.repeat(least)
        counted = {name: tensor[used] for name, tensor in micro_batch.items()}
        weights, gradient_weights = weights[used], gradient_weights[used]
        weights[len(rows) :] = gradient_weights[len(rows) :] = 0
        return counted, weights, gradient_weights

    def copied(self) -> "TorchBatch":
        """Return a batch whose tensors a model may change."""
        copies = [{name: tensor.clone() for name, tensor in one.items()} for one in self.micro_batches]
        return replace(self, micro_batches=copies)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield everything that lies on the device."""
        yield from self.weights
        yield from self.gradient_weights
        yield from (rows for rows in self.counted_rows if rows is not None)
        for micro_batch in self.micro_batches:
            yield from micro_batch.values()


class BatchMaker:
    """Copies batches to the device; what they have of weights is kept while it stays the same."""

    def __init__(self, device: torch.device, is_local: bool = False) -> None:
        self._device = device
        self._is_local = is_local
        self.float_bits = 32
        self._known_weights: tuple[NDArray[Any], tuple[Any, ...]] | None = None

    def __call__(self, batch: HostBatch) -> TorchBatch:
        """Return a batch on the device."""
        slots = range(len(batch.weights))
        weights, gradient_weights, counted_rows, reduced_weight = self._weigh(batch)
        return TorchBatch(
            step=batch.step,
            # views are taken of the numpy arrays, which costs a fraction of a tensor's
            micro_batches=[{name: self._move(a[i]) for name, a in batch.arrays.items()} for i in slots],
            weights=weights,
            gradient_weights=gradient_weights,
            total_weight=batch.total_weight,
            reduced_weight=reduced_weight,
            counted_rows=counted_rows,
            samples=Samples(batch.indices, batch.weights, batch.range_samples),
            in_warmup=batch.in_warmup,
        )

    def _weigh(self, batch: HostBatch) -> tuple[Any, ...]:
        """Return weights, gradient weights, the rows that count and the sum that gradients are divided by."""
        known = self._known_weights
        if known is None or known[0] is not batch.weights:
            reduced = float(batch.weights.sum()) if self._is_local else batch.total_weight
            kind = np.dtype(f"float{self.float_bits}").type
            given = batch.weights.astype(kind, copy=False)
            parts = given * kind(1 / (reduced or 1))
            rows = [np.flatnonzero(w) for w in batch.weights]
            tensors = (
                [self._move(w) for w in given],
                [self._move(w) for w in parts],
                [self._move(r) if 0 < len(r) < batch.weights.shape[1] else None for r in rows],
                reduced,
            )
            known = self._known_weights = batch.weights, tensors
        return known[1]

    def _move(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


class TorchPending(PendingVector):
    """The metrics of a step on their way from the device."""

    def __init__(
        self, names: tuple[str, ...], vector: torch.Tensor, *arguments: Any, workers: int = 1, **options: Any
    ) -> None:
        # one worker waits for nobody
        super().__init__(names, vector, *arguments, workers=workers if workers > 1 else 0, **options)
        self._event: torch.cuda.Event | None = None
        if vector.is_cuda:
            # only a copy into pinned memory lets the host continue
            self._vector = torch.empty(vector.shape, pin_memory=True).copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def _numbers(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return list(self._vector.tolist())
