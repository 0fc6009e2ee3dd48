"""How the TensorFlow backend calls steps and models, and what it computes with gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.counting import Weighted
from hvdtrain.backends.logits import bad_target

Tensor = Any
Signature = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


class Compiled:
    """A step, compiled once for each signature of its batches.

    ``tf.function`` looks its arguments over at every call, which takes more than a hundred
    microseconds; this remembers what it compiled. Without autograph, as in Keras's own loops,
    errors of a task stay what they are.

    Args:
        step: the step.
        trace: returns what was learnt while the step was traced last.
    """

    def __init__(self, step: Callable[..., Tensor], trace: Callable[[], Any]) -> None:
        self._function = tf.function(step, autograph=False)
        self._trace = trace
        self._known: dict[Signature, tuple[Callable[..., Tensor], Any]] = {}

    def __call__(self, signature: Signature, *arguments: Any) -> tuple[Tensor, Any]:
        """Run the step as it was compiled for this signature; return its result and its trace's."""
        if signature not in self._known:
            self._known[signature] = self._function.get_concrete_function(*arguments), self._trace()
        function, trace = self._known[signature]
        try:
            return function(*arguments), trace
        except tf.errors.InvalidArgumentError as error:
            raise bad_target(error) or error from None


class Phase:
    """A model whose calls are in training or in evaluation, as ``model.train()`` has it in PyTorch.

    It is made for one evaluation of the objective, while that is traced, and collects the losses that the
    model adds to it: those of ``add_loss``, activity regularizers and the regularizers of weights.
    """

    def __init__(self, model: Any, training: bool) -> None:
        self._model = model
        self.__wrapped__ = model  # inspect.unwrap finds the model, whose signature says how it is called
        self._call = partial(model, training=training)
        self._of_earlier_calls: list[Tensor] = []
        self._are_losses_read = False
        model._clear_losses()  # tensors of another trace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in this phase."""
        layers = self._model._flatten_layers()
        self._of_earlier_calls += [loss for layer in layers for loss in layer._get_own_losses()]
        return self._call(*args, **kwargs)  # Keras clears the losses of the call before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def losses(self) -> list[Tensor]:
        """The model's losses; an objective that reads them adds them itself."""
        self._are_losses_read = True
        losses: list[Tensor] = self._model.losses
        return losses

    def added_loss(self) -> Tensor | None:
        """Return the sum of the losses that the model adds, in fp32; None if there are none to add."""
        losses = [*self._of_earlier_calls, *self._model.losses]
        if self._are_losses_read or not losses:
            return None
        return tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses])


def add_to_loss(losses: Any, added: Tensor) -> Any:
    """Return a loss to which a number has been added for every sample, so that it counts once per step."""
    if isinstance(losses, Weighted):
        return Weighted(tf.cast(losses.values, tf.float32) + added, losses.weights)
    return tf.cast(losses, tf.float32) + added


def native(variable: Any) -> Any:
    """Return TensorFlow's own variable of a Keras one."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def dense(gradients: Sequence[Tensor], parameters: Sequence[Any], zero: Tensor) -> list[Tensor]:
    """Return every gradient as a dense tensor, zeros in place of one that is None.

    The zeros come from a variable: of constant zeros, TensorFlow would work out the all-reduce when it
    compiles the step, waiting for workers whose gradients are not constant.
    """
    return [
        tf.fill(v.shape, tf.cast(zero.read_value(), v.dtype)) if g is None else tf.convert_to_tensor(g)
        for g, v in zip(gradients, parameters, strict=True)
    ]


def clip_by_norm(gradients: Sequence[Tensor], clip_norm: float) -> list[Tensor]:
    """Scale gradients so that their joint norm is at most ``clip_norm``.

    Source: torch.nn.utils.clip_grad_norm_, whose small constant it shares.
    """
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradients]))
    factor = tf.minimum(1.0, clip_norm / (norm + 1e-6))
    return [g * factor for g in gradients]
