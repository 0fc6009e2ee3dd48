"""What a step of an elastic job changes before its last reduction has succeeded, and its way back.

``torch/state/moving_state.py`` does the same for PyTorch.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.functions import native

Layer = Any
Variable = Any


class MovingState:
    """The values before a step of everything that the step changes while it may still fail.

    Those are the variables that a forward pass changes, such as the statistics of batch norm. A task's own
    step also updates parameters before its last reduction; of it, all that it changes is copied.

    Args:
        changed_early: variables that a step updates before its last reduction.
    """

    def __init__(self, model: Layer, changed_early: Sequence[Variable] = ()) -> None:
        variables = [*_moving_variables(model), *changed_early]
        self._variables = list({id(native(v)): native(v) for v in variables}.values())
        self._copies = [tf.Variable(v, trainable=False, name="before_step") for v in self._variables]
        self._keep = _compiled_copy(self._variables, self._copies)
        self._restore = _compiled_copy(self._copies, self._variables)
        self._is_kept = False

    def keep(self) -> None:
        """Copy the variables; called before each step. Local: no collective."""
        self._is_kept = False
        if self._variables:
            self._keep()
        self._is_kept = True

    def restore(self) -> None:
        """Give the variables the values that they had before the step that failed, if one was begun."""
        if self._is_kept and self._variables:
            self._restore()
        self._is_kept = False


def _moving_variables(model: Layer) -> list[Variable]:
    """Return the variables of a model that its forward pass in training may change.

    They are the layers' own that are not parameters, and the kernels that spectral normalisation divides.
    Frozen parameters are not among them, nor the states of random generators, which each step sets.
    """
    layers = {id(layer): layer for layer in model._flatten_layers()}.values()
    found = [variable for layer in layers for variable in layer._non_trainable_variables]
    return found + [layer.kernel for layer in layers if isinstance(layer, keras.layers.SpectralNormalization)]


def _compiled_copy(sources: Sequence[Variable], targets: Sequence[Variable]) -> Any:
    """Return a compiled function that copies each source to its target."""

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.assign(source.read_value())

    return tf.function(copy, autograph=False).get_concrete_function()
