"""The moving average of a Keras model's weights; ``_torch_averages`` holds its twin."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdtrain.backends._averaging import PREFIX, share_of_new
from hvdtrain.backends._keras_optimizers import native
from hvdtrain.backends._keras_state import Entry, ModelState

Tensor = Any


class Averages:
    """The average of every trainable variable; of none where there is no decay.

    Other variables, such as the statistics of batch norm, are not averaged: the model's own go with it.

    Args:
        model: the model's variables.
        decay: of the average, per step; None where there is none.

    Attributes:
        entries: the averages as portable arrays.
    """

    def __init__(self, model: ModelState, decay: float | None) -> None:
        self._decay = decay or 0.0
        entries = [entry for entry in model.entries if entry.trainable and decay is not None]
        self._weights = [native(entry.variable) for entry in entries]
        self._averages = [tf.Variable(weight, trainable=False) for weight in self._weights]
        self.entries: list[Entry] = [
            replace(entry, variable=average, trainable=False, prefix=PREFIX)
            for entry, average in zip(entries, self._averages, strict=True)
        ]
        self._none = tf.constant(0.0)

    def share(self, step: int) -> Tensor:
        """Give the part of the average that a step's weights make up.

        Args:
            step: steps done, this one included.
        """
        return tf.constant(share_of_new(step, self._decay), tf.float32) if self._averages else self._none

    def update(self, share: Tensor) -> None:
        """Take in the weights that a step has given, as that part of the average; in a compiled step."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.assign_add((weight - average) * tf.cast(share, average.dtype))

    def restart(self) -> None:
        """Start from the weights as they are."""
        _copy(self._weights, self._averages)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Context in which the model's weights are the averages."""
        own = [tf.identity(weight) for weight in self._weights]
        _copy(self._averages, self._weights)
        try:
            yield
        finally:
            _copy(own, self._weights)

    def variables(self) -> list[Any]:
        """Give the averages."""
        return self._averages


def _copy(sources: list[Any], targets: list[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.assign(source)
