"""Optimizers for Keras 3 by PyTorch's formulas, as native operations of TensorFlow: sgd and adamw."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.functions import native

Tensor = Any
Variable = Any


# for each variable, in the order in which the optimizer is built: what the learning rate is multiplied by,
# and the weight decay
Groups = Sequence[tuple[float, float]]


def rate_and_decay(optimizer: Any, variable: Variable, learning_rate: Tensor) -> tuple[Tensor, float]:
    """Return the learning rate and the weight decay of one variable, by the optimizer's ``groups``."""
    if not optimizer.groups:
        return learning_rate, 0.0
    factor, decay = optimizer.groups[optimizer._get_variable_index(variable)]
    return (learning_rate if factor == 1 else learning_rate * factor), decay


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
        self,
        learning_rate: float = 0.01,
        momentum: float = 0.0,
        groups: Groups = (),
        name: str = "sgd",
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name)
        self.momentum, self.groups = momentum, groups

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
        rate, decay = rate_and_decay(self, variable, learning_rate)
        w = native(variable)
        g = tf.cast(tf.convert_to_tensor(gradient), w.dtype)
        self.move(variable, g + decay * w if decay else g, rate)

    def move(self, variable: Variable, g: Tensor, learning_rate: Tensor) -> None:
        """Update one variable by a gradient that has its decay already."""
        w = native(variable)
        rate = tf.cast(learning_rate, w.dtype)
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=w.handle, alpha=rate, delta=g)
            return
        v = self.slots["momentum"][self._get_variable_index(variable)].value
        tf.raw_ops.ResourceApplyMomentum(
            var=w.handle, accum=v.handle, lr=rate, grad=g, momentum=tf.constant(self.momentum, w.dtype)
        )


class TwoMoments(keras.optimizers.Optimizer):
    """What adamw and lamb have in common: the moments of the gradient, and what takes their bias off."""

    def __init__(
        self, beta1: float, beta2: float, epsilon: float, groups: Groups, name: str = "adamw"
    ) -> None:
        super().__init__(learning_rate=1e-3, name=name)
        self.beta1, self.beta2, self.epsilon, self.groups = beta1, beta2, epsilon, groups

    def build(self, variables: list[Variable]) -> None:
        """Make the slots."""
        if self.built:
            return
        super().build(variables)
        first, second = self.add_optimizer_variables(variables, ["first_moment", "second_moment"])
        self.slots = {"first_moment": first, "second_moment": second}

    def corrections(self) -> tuple[Tensor, Tensor]:
        """Return 1 - beta1**t and sqrt(1 - beta2**t) for the step t that is being done.

        In 64 bits, as PyTorch computes them: 1 - 0.999 in 32 bits is off by 1e-5.
        """
        step = tf.cast(self.iterations.value + 1, tf.float64)
        correction1 = 1 - tf.pow(tf.constant(self.beta1, tf.float64), step)
        return correction1, tf.sqrt(1 - tf.pow(tf.constant(self.beta2, tf.float64), step))


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

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Update one variable."""
        w = native(variable)
        index = self._get_variable_index(variable)
        learning_rate, decay = rate_and_decay(self, variable, learning_rate)
        rate = tf.cast(learning_rate, tf.float64)
        correction1, root2 = self.corrections()
        if decay:
            w.assign_sub(w * tf.cast(rate * decay, w.dtype))
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
