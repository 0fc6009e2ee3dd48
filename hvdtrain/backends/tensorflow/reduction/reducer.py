"""What TensorFlow's reducers share: a vector that travels by itself."""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd

from hvdtrain.backends.reduction import GradientReducer

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
