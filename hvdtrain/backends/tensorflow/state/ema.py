"""The moving average of a Keras model's weights; ``torch/state/ema.py`` does the same for PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.portable.initial_values import PREFIX, share_of_new
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState

Tensor = Any


class ExponentialMovingAverage:
    """The average of every trainable variable; of none where there is no decay.

    Other variables, such as the statistics of batch norm, are not averaged: the model's own go with it.

    Args:
        decay: of the average, per step; None where there is none.

    Attributes:
        decay: of the average, per step; 0 where there is none.
    """

    def __init__(self, model: ModelState, decay: float | None) -> None:
        self.decay = decay or 0.0
        fields = [] if decay is None else list(model.trainable_fields())
        self._weights = [native(field.variable) for field in fields]
        self._averages = [tf.Variable(weight, trainable=False) for weight in self._weights]
        self.fields: list[Field] = [
            replace(field, variable=average, trainable=False, prefix=PREFIX)
            for field, average in zip(fields, self._averages, strict=True)
        ]
        self._none = tf.constant(0.0)

    def renewed(self, model: ModelState) -> "ExponentialMovingAverage":
        """Return the average of the variables that are trainable now; what is new starts from its weights."""
        found = ExponentialMovingAverage(model, self.decay or None)
        known = {field.name: field.variable for field in self.fields}
        for field in found.fields:
            field.variable.assign(known.get(field.name, field.variable))
        return found

    def share(self, step: int) -> Tensor:
        """Return the part of the average that a step's weights make up."""
        if not self._averages:
            return self._none
        return tf.constant(np.asarray(share_of_new(step, self.decay), np.float32))  # as the learning rate

    def update(self, share: Tensor) -> None:
        """Take in the weights that a step has given, as that part of the average; in a compiled step."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.assign_add((weight - average) * tf.cast(share, average.dtype))

    def restart(self) -> None:
        """Start from the weights as they are."""
        _copy(self._weights, self._averages)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Return a context in which the model's weights are the averages."""
        own = [tf.identity(weight) for weight in self._weights]
        _copy(self._averages, self._weights)
        try:
            yield
        finally:
            _copy(own, self._weights)

    def to_broadcast(self) -> list[Any]:
        """Return the averages as Horovod broadcasts them."""
        return self._averages

    def follow_broadcast(self) -> None:
        """Follow weights that were broadcast; the averages were broadcast with them."""


def _copy(sources: list[Any], targets: list[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.assign(source)
