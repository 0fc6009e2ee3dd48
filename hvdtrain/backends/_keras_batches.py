"""What TensorFlow's steps take, and give: batches on the device, totals on their way from it."""

from dataclasses import dataclass
from typing import Any

from hvdtrain.backends._keras_calls import Signature
from hvdtrain.backends.base import Totals

Tensor = Any


@dataclass(frozen=True, slots=True)
class KerasBatch:
    """One worker's part of one step on its device.

    Attributes:
        step: the step, counted from 0.
        arrays: name to tensor (accumulate, micro_batch, ...); without the first axis where
            there is one micro-batch.
        weights: (accumulate, micro_batch), likewise.
        gradient_weights: likewise: each sample's part in the mean gradient, times the number of
            workers, as Horovod averages over them.
        total_weight: sum of the weights over all workers.
        signature: shapes and types of the arrays.
    """

    step: int
    arrays: dict[str, Tensor]
    weights: Tensor
    gradient_weights: Tensor
    total_weight: float
    signature: Signature


class KerasPending:
    """Totals on their way from the device."""

    def __init__(self, names: tuple[str, ...], sums: Tensor, weight: float) -> None:
        self._names = names
        self._weight = weight
        self._sums = sums

    def read(self) -> Totals:
        """Wait for the device if need be and give the totals."""
        return Totals.from_vector(self._names, self._sums.numpy().tolist(), self._weight)
