"""The moving average of the weights, and what an elastic job's step changes early; as in ``torch/``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.portable.initial_values import PREFIX, share_of_new
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState

Tensor = Any


class ExponentialMovingAverage:
    """The average of every trainable variable, not of statistics; of none where there is no decay."""

    def __init__(self, model: ModelState, decay: float | None) -> None:
        self.decay = decay or 0.0
        fields = [] if decay is None else list(model.trainable_fields())
        self._weights = [native(field.variable) for field in fields]
        self._averages = [tf.Variable(weight, trainable=False) for weight in self._weights]
        self.fields: list[Field] = [
            replace(field, variable=average, trainable=False, prefix=PREFIX)
            for field, average in zip(fields, self._averages, strict=True)
        ]

    def renewed(self, model: ModelState) -> "ExponentialMovingAverage":
        """Return the average of the variables that are trainable now; what is new starts from its weights."""
        found = ExponentialMovingAverage(model, self.decay or None)
        known = {field.name: field.variable for field in self.fields}
        for field in found.fields:
            field.variable.assign(known.get(field.name, field.variable))
        return found

    def share(self, step: int) -> Tensor:
        """Return the part of the average that a step's weights make up."""
        # as the learning rate
        return tf.constant(np.asarray(share_of_new(step, self.decay) if self._averages else 0, np.float32))

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


Layer = Any
Variable = Any


class MovingState:
    """The values before a step of what a forward pass, or a task's own step, changes before it succeeds."""

    def __init__(self, model: Layer, changed_early: Sequence[Variable] = ()) -> None:
        # what a forward pass may change: no parameters, but kernels of spectral normalisation
        layers = {id(layer): layer for layer in model._flatten_layers()}.values()
        variables = [v for layer in layers for v in layer._non_trainable_variables]
        variables += [one.kernel for one in layers if isinstance(one, keras.layers.SpectralNormalization)]
        variables += changed_early
        self._variables = list({id(native(v)): native(v) for v in variables}.values())
        self._copies = [tf.Variable(v, trainable=False, name="before_step") for v in self._variables]
        self._keep = _compiled_copy(self._variables, self._copies)
        self._restore = _compiled_copy(self._copies, self._variables)
        self._is_kept = False

    def keep(self) -> None:
        """Copy the variables; called before each step. Local: no collective."""
        self._is_kept = False
        self._keep()
        self._is_kept = True

    def restore(self) -> None:
        """Give the variables the values that they had before the step that failed, if one was begun."""
        if self._is_kept:
            self._restore()
        self._is_kept = False


def _compiled_copy(sources: Sequence[Variable], targets: Sequence[Variable]) -> Any:
    """Return a compiled function that copies each source to its target."""

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.assign(source.read_value())

    return tf.function(copy, autograph=False).get_concrete_function()
