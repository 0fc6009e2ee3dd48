"""The stages of a step in TensorFlow if each worker updates a part of the parameters."""

from typing import Any

import tensorflow as tf

from hvdtrain.backends.tensorflow.reduction.sharded_parameters import ShardedParameters, segment_of
from hvdtrain.backends.tensorflow.steps.parts import Parts
from hvdtrain.backends.tensorflow.steps.update import Update

Tensor = Any


class ShardedUpdate(Update):
    """The update of a step after which every worker has the whole gradient and updates its part."""

    def __init__(self, parts: Parts) -> None:
        self._shards: ShardedParameters = parts.shards
        super().__init__(parts)

    def update(self, gradients: list[Tensor], learning_rate: Tensor) -> None:
        """Collective. Let the optimizer update this worker's part, and gather all parts."""
        self._shards.use(gradients)
        with self._after_reductions():
            self._shards.follow()
        by_path = {field.path: gradient for field, gradient in zip(self._fields, gradients, strict=True)}
        own = [segment_of(segment, by_path[segment.entry.path]) for segment in self._shards.segments]
        super().update(own or [tf.zeros([0])], learning_rate)
        self._shards.gather(lambda segment: segment.tensor.value, "parameters")

    def _updated(self) -> list[tuple[str, Any]]:
        paths = [segment.entry.path for segment in self._shards.segments] or [""]
        return list(zip(paths, self._shards.variables, strict=True))
