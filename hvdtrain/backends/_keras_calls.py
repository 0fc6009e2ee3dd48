"""How the TensorFlow backend calls steps and models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

Tensor = Any
Signature = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


class Compiled:
    """A step, compiled once for each signature of its batches.

    ``tf.function`` looks its arguments over at every call, which takes more than a hundred
    microseconds; this remembers what it compiled. Without autograph, as in Keras's own loops,
    errors of a task stay what they are.
    """

    def __init__(self, step: Callable[..., Tensor]) -> None:
        self._function = tf.function(step, autograph=False)
        self._known: dict[Signature, Callable[..., Tensor]] = {}

    def __call__(self, signature: Signature, *arguments: Any) -> Tensor:
        if signature not in self._known:
            self._known[signature] = self._function.get_concrete_function(*arguments)
        return self._known[signature](*arguments)


class Phase:
    """A model whose calls are in training or in evaluation, as ``model.train()`` has it in PyTorch."""

    def __init__(self, model: Any, training: bool) -> None:
        self._model = model
        self._call = partial(model, training=training)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
