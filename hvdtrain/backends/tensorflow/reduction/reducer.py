"""What TensorFlow's reducers share: a vector that travels by itself, and what is kept from step to step."""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np

from hvdtrain.backends.reduction import GradientReducer, Kept
from hvdtrain.backends.tensorflow.reduction.broadcast import broadcast_variables

Tensor = Any


class Reducer(GradientReducer):
    """A reducer of TensorFlow; see ``GradientReducer``."""

    def finish(self, gradients: Sequence[Tensor], vector: Tensor = None) -> tuple[list[Tensor], Tensor]:
        """Collective. Return the sum of each gradient over workers, and that of a vector, by itself."""
        if not self._workers.may_reduce:
            return list(gradients), vector
        if vector is not None:
            vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")
        return self._sum(gradients), vector

    def broadcast(self, root: int) -> None:
        """Collective. Copy what the root keeps to every worker."""
        broadcast_variables([one.tensor for one in self.kept()], root, label="reducer")

    def _read(self, kept: Kept) -> Any:
        value, size = kept.tensor.read_value(), self._workers.size
        if kept.is_part and size > 1:
            value = hvd.allreduce(value, op=hvd.Sum, name=f"hvdtrain.{kept.portable_name}")
        if kept.is_part:
            kept.tensor.assign(value / np.float32(size))
        return np.array(value.numpy()).reshape(kept.shape)

    def _write(self, kept: Kept, array: Any) -> None:
        numbers = np.broadcast_to(np.asarray(array, np.float32), kept.shape).reshape(kept.tensor.shape)
        kept.tensor.assign(numbers / np.float32(self._workers.size if kept.is_part else 1))
