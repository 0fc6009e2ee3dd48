"""Gradients of TensorFlow that travel as fp16."""

from typing import Any

import tensorflow as tf

from hvdtrain.backends.tensorflow.reduction.all_reduce import AllReduce


class Fp16(AllReduce):
    """All-reduces of floating-point gradients as fp16: half the bytes of fp32.

    Each gradient is multiplied by the number of workers before it is cast, and the sum is divided by it:
    gradients are parts of the mean over all workers, which get smaller as workers are added, and fp16 has
    few digits below 6e-5. For powers of two this changes nothing else. A loss scale has multiplied them
    already.
    """

    carries = False

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        return "fp32, sent as fp16"

    def _cast_for(self, dtype: Any) -> tuple[Any, Any]:
        if not dtype.is_floating:
            return super()._cast_for(dtype)
        if self._scaled:
            return tf.float16, 1
        size = self._workers.size
        return tf.float16, tf.cast(size, dtype) if self._workers.is_elastic else size
