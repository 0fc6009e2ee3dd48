"""Optimizers for Keras 3 on TensorFlow: PyTorch's sgd and adamw, and the distributed wrapper.

Horovod's own Keras wrappers hook methods that Keras 3 never calls: under Keras 3 they leave the
gradients unreduced, without a word. This one reduces them where Keras 3 applies them.
"""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from hvdtrain.backends._keras_precision import LossScale

Tensor = Any
Variable = Any

_COMPRESSION = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}


class SGD(keras.optimizers.Optimizer):
    """Stochastic gradient descent by PyTorch's formula, as one native operation per variable.

    ::

        g = gradient + weight_decay * w
        v = momentum * v + g
        w = w - learning_rate * v

    Source: torch.optim.SGD with dampening 0. Keras's SGD folds the learning rate into v, which
    differs as soon as the learning rate changes.
    """

    def __init__(
        self, learning_rate: float = 0.01, momentum: float = 0.0, l2: float = 0.0, name: str = "sgd"
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name)
        self.momentum = momentum
        self.l2 = l2

    def build(self, variables: list[Variable]) -> None:
        """Make the slots."""
        if self.built:
            return
        super().build(variables)
        self.slots = (
            {"momentum": self.add_optimizer_variables(variables, "momentum")} if self.momentum else {}
        )

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Update one variable."""
        w = native(variable)
        g = tf.cast(tf.convert_to_tensor(gradient), w.dtype)
        if self.l2:
            g += self.l2 * w
        rate = tf.cast(learning_rate, w.dtype)
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=w.handle, alpha=rate, delta=g)
            return
        v = self.slots["momentum"][self._get_variable_index(variable)].value
        tf.raw_ops.ResourceApplyMomentum(
            var=w.handle, accum=v.handle, lr=rate, grad=g, momentum=tf.constant(self.momentum, w.dtype)
        )

    def get_config(self) -> dict[str, Any]:
        """Give the constructor's arguments."""
        config = {"learning_rate": float(self.learning_rate.numpy()), "name": self.name}
        return {**config, "momentum": self.momentum, "l2": self.l2}


class TwoMoments(keras.optimizers.Optimizer):
    """What adamw and lamb have in common: the moments of the gradient, and what takes their bias off."""

    def __init__(
        self, learning_rate: float, beta1: float, beta2: float, epsilon: float, *, name: str
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name)
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon

    def build(self, variables: list[Variable]) -> None:
        """Make the slots."""
        if self.built:
            return
        super().build(variables)
        first, second = self.add_optimizer_variables(variables, ["first_moment", "second_moment"])
        self.slots = {"first_moment": first, "second_moment": second}

    def corrections(self) -> tuple[Tensor, Tensor]:
        """Give 1 - beta1**t and sqrt(1 - beta2**t) for the step t that is being done.

        In 64 bits, as PyTorch computes them: 1 - 0.999 in 32 bits is off by 1e-5.
        """
        step = tf.cast(self.iterations.value + 1, tf.float64)
        correction1 = 1 - tf.pow(tf.constant(self.beta1, tf.float64), step)
        return correction1, tf.sqrt(1 - tf.pow(tf.constant(self.beta2, tf.float64), step))

    def get_config(self) -> dict[str, Any]:
        """Give the constructor's arguments."""
        config = {"learning_rate": float(self.learning_rate.numpy()), "name": self.name}
        return {**config, "beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}


class AdamW(TwoMoments):
    """Adam with decoupled weight decay by PyTorch's formula, as native operations.

    ::

        w = w - learning_rate * weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = w - learning_rate / (1 - beta1**t) * m / (sqrt(v) / sqrt(1 - beta2**t) + epsilon)

    Source: torch.optim.AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101). Keras's AdamW adds
    epsilon before it corrects the bias.
    """

    def __init__(  # noqa: PLR0917 - as torch.optim.AdamW
        self,
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        decoupled_decay: float = 0.0,
        name: str = "adamw",
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, name=name)
        self.decoupled_decay = decoupled_decay

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Update one variable."""
        w = native(variable)
        index = self._get_variable_index(variable)
        rate = tf.cast(learning_rate, tf.float64)
        correction1, root2 = self.corrections()
        if self.decoupled_decay:
            w.assign_sub(w * tf.cast(rate * self.decoupled_decay, w.dtype))
        # the operation corrects no bias when both powers are 0, and adds epsilon to the uncorrected
        # sqrt(v): with these values its formula is the one above
        zero = tf.zeros((), w.dtype)
        tf.raw_ops.ResourceApplyAdam(
            var=w.handle,
            m=self.slots["first_moment"][index].value.handle,
            v=self.slots["second_moment"][index].value.handle,
            beta1_power=zero,
            beta2_power=zero,
            lr=tf.cast(rate * root2 / correction1, w.dtype),
            beta1=tf.constant(self.beta1, w.dtype),
            beta2=tf.constant(self.beta2, w.dtype),
            epsilon=tf.cast(self.epsilon * root2, w.dtype),
            grad=tf.cast(tf.convert_to_tensor(gradient), w.dtype),
        )

    def get_config(self) -> dict[str, Any]:
        """Give the constructor's arguments."""
        return {**super().get_config(), "decoupled_decay": self.decoupled_decay}


class DistributedOptimizer(keras.optimizers.Optimizer):
    """Wraps a Keras 3 optimizer so that gradients are averaged over workers before they are applied.

    It works wherever Keras 3 applies gradients: in a compiled step of one's own and under
    ``model.fit``. A variable without a gradient takes part with zeros, so that a model with
    branches cannot leave other workers waiting. Under ``model.fit`` on GPUs, compile the model with
    ``jit_compile=False``: the build leaves Horovod's operations for XLA out.

    Args:
        inner: the optimizer that applies the averaged gradients.
        compression: "none" or "fp16", how gradients travel.
        clip_norm: largest norm of the averaged gradient, or None.
        loss_scale: takes the scale off averaged gradients, and may skip a step; or None.
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        compression: str = "none",
        clip_norm: float | None = None,
        name: str = "distributed",
        *,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.loss_scale = loss_scale
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
        if self.loss_scale is None:
            self._update(averaged, variables)
        else:
            self.loss_scale.apply(averaged, lambda unscaled: self._update(unscaled, variables))

    def _update(self, averaged: list[Tensor], variables: list[Variable]) -> None:
        if self.clip_norm is not None:
            averaged = clip_by_norm(averaged, self.clip_norm)
        self.inner.apply(averaged, variables)

    def average(self, grads: Sequence[Tensor], variables: Sequence[Variable]) -> list[Tensor]:
        """Collective. Give the mean of each gradient over workers, dense."""
        dense = self.dense(grads, variables)
        if hvd.size() == 1:
            return dense
        return [self._allreduce(g, i) for i, g in enumerate(dense)]

    def dense(self, grads: Sequence[Tensor], variables: Sequence[Variable]) -> list[Tensor]:
        """Give every gradient as a dense tensor, zeros in place of a missing one.

        The zeros come from a variable: of constant zeros, TensorFlow would work out the all-reduce
        when it compiles the step, waiting for workers whose gradients are not constant.
        """
        return [
            tf.fill(v.shape, tf.cast(self._zero.read_value(), v.dtype))
            if g is None
            else tf.convert_to_tensor(g)
            for g, v in zip(grads, variables, strict=True)
        ]

    def _allreduce(self, gradient: Tensor, index: int) -> Tensor:
        # Without a mark of its own, TensorFlow merges the all-reduces of gradients that are equal on
        # this worker, for which others that have two would wait.
        mark = {"_hvdtrain_gradient": AttrValue(i=index)}
        with tf.compat.v1.get_default_graph()._attr_scope(mark):
            return hvd.allreduce(
                gradient,
                op=hvd.Average,
                compression=_COMPRESSION[self.compression],
                name=f"hvdtrain.gradient.{index}",
            )

    @property
    def variables(self) -> list[Variable]:
        """Give the inner optimizer's variables and this one's."""
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
        """Give the constructor's arguments."""
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


def clip_by_norm(grads: list[Tensor], clip_norm: float) -> list[Tensor]:
    """Scale gradients so that their joint norm is at most ``clip_norm``.

    Source: torch.nn.utils.clip_grad_norm_, whose small constant it shares.
    """
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g)) for g in grads]))
    factor = tf.minimum(1.0, clip_norm / (norm + 1e-6))
    return [g * factor for g in grads]


def native(variable: Variable) -> Any:
    """Give TensorFlow's own variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable
