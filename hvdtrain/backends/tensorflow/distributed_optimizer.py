"""An optimizer for ``model.fit`` on several workers: Horovod's own wrappers do nothing under Keras 3."""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdtrain.backends.reduction import reducer_class
from hvdtrain.backends.tensorflow.batches import FixedSize
from hvdtrain.backends.tensorflow.functions import clip_by_norm, dense
from hvdtrain.config.values import COMPRESSIONS
from hvdtrain.errors import ConfigError

Tensor = Any
Variable = Any


class DistributedOptimizer(keras.optimizers.Optimizer):
    """Wraps a Keras 3 optimizer so that gradients are averaged over workers before they are applied.

    It works wherever Keras 3 applies gradients: in a compiled step of one's own and under
    ``model.fit``. A variable without a gradient takes part with zeros, so that a model with
    branches cannot leave other workers waiting. Under ``model.fit`` on GPUs, compile the model with
    ``jit_compile=False``: the build leaves Horovod's operations for XLA out.

    Args:
        inner: the optimizer that applies the averaged gradients.
        compression: "none", "fp16" or "bf16", how gradients travel.
        clip_norm: largest norm of the averaged gradient, or None.
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        compression: str = "none",
        clip_norm: float | None = None,
        name: str = "distributed",
    ) -> None:
        known = [name for name, row in COMPRESSIONS.items() if not row.keeps]
        if compression not in known:
            raise ConfigError(
                f"compression should be {', '.join(map(repr, known))}, found {compression!r}",
                "PowerSGD, which keeps a state in addition to the optimizer's, needs hvdtrain's own loop.",
            )
        super().__init__(learning_rate=0.0, name=name)
        self.inner = inner
        self.compression = compression
        self.clip_norm = clip_norm

    def build(self, variables: list[Variable]) -> None:
        """Make the inner optimizer's slots."""
        self.inner.build(variables)
        super().build(variables)
        self._zero = tf.Variable(0.0, trainable=False, name="zero")

    def apply(self, grads: Sequence[Tensor], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Collective. Average the gradients over workers, clip them and apply them."""
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            self.build(variables)
        averaged = self.average(grads, variables)
        if self.clip_norm is not None:
            averaged, _ = clip_by_norm(averaged, self.clip_norm)
        self.inner.apply(averaged, variables)

    def average(self, grads: Sequence[Tensor], variables: Sequence[Variable]) -> list[Tensor]:
        """Collective. Return the mean of each gradient over workers, dense."""
        size = hvd.size()
        reducer = reducer_class("tf", self.compression)(FixedSize(size))
        reducer.attach({str(index): variable for index, variable in enumerate(variables)})
        # a reducer sums parts of the mean
        return reducer.finish([gradient / size for gradient in dense(grads, variables, self._zero)])[0]

    @property
    def variables(self) -> list[Variable]:
        """Return the inner optimizer's variables and this one's."""
        own: list[Variable] = self._variables
        return own + list(self.inner.variables)

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner.learning_rate = value

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of steps."""
        return self.inner.iterations

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "inner": keras.saving.serialize_keras_object(self.inner),
            "compression": self.compression,
            "clip_norm": self.clip_norm,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "DistributedOptimizer":
        """Make the optimizer from ``get_config``'s result."""
        inner = keras.saving.deserialize_keras_object(config["inner"], custom_objects=custom_objects)
        return cls(**{**config, "inner": inner})
