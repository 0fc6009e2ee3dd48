"""Looking into a model of Keras; ``torch/probe.py`` does the same for PyTorch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.base import Backend, PortableState
from hvdtrain.backends.objective.counting import Weighted
from hvdtrain.backends.objective.objective import make_objective
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.tensorflow.dry_run import state_kept
from hvdtrain.backends.tensorflow.functions import Phase, add_to_loss, native, phase_of_layers
from hvdtrain.backends.tensorflow.objective.losses import NAMED
from hvdtrain.backends.tensorflow.precision import cast_outputs_to_fp32
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState, walk
from hvdtrain.config import Config
from hvdtrain.parity.paths import layer_paths
from hvdtrain.parity.tensorflow.calls import Recorder, to_array
from hvdtrain.parity.tensorflow.settings import optimizer_settings, stop_dropout
from hvdtrain.tools.parity.findings import CONSTRAINTS
from hvdtrain.tools.parity.observation import ForwardPass

Arrays = Mapping[str, NDArray[Any]]
Tensor = Any


@contextmanager
def in_fp64() -> Iterator[None]:
    """Return a context in which models are made that compute in fp64."""
    floats, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(floats)
        keras.config.set_dtype_policy(policy)


def make_probe(backend: Backend, task: Any, config: Config) -> "TensorFlowProbe":
    """Return what looks into the backend's model."""
    return TensorFlowProbe(backend, task, config)


class TensorFlowProbe:
    """Looks into a model that the backend has built.

    Args:
        backend: the backend.
        task: the task.
        config: the config.
    """

    def __init__(self, backend: Backend, task: Any, config: Config) -> None:
        self._backend: Any = backend
        self._model = backend.model
        self._called = cast_outputs_to_fp32(self._model, config.precision)
        self._objective = make_objective(task, "tf", NAMED)
        self._train_objective = make_objective(task, "tf", NAMED, config.label_smoothing)
        renaming = Renaming(task, "tf")
        tensors = ModelState(self._model, renaming)
        self._fields = list(tensors.trainable_fields())
        self._paths = layer_paths(
            (("/".join(path), id(layer)) for path, layer in walk(self._model)),
            ((field.own, field.path) for field in tensors.fields),
            renaming,
        )

    def forward(self, arrays: Arrays) -> tuple[ForwardPass, ForwardPass]:
        """Return two forward passes in evaluation with the same samples."""
        with state_kept(self._model):
            return self._forward(arrays), self._forward(arrays)

    def stop_dropout(self) -> list[float]:
        """Let dropout layers drop nothing from now on; return the rates that they had."""
        return stop_dropout(self._model)

    def losses_in_training(self, arrays: Arrays, weights: NDArray[Any]) -> tuple[float, float]:
        """Return the mean losses of two passes in training, which draw random numbers one after the other."""
        with state_kept(self._model):
            # weights are without the state of random generators
            before = [(one, np.array(one.numpy())) for one in self._model.non_trainable_weights]
            first = float(self._mean_loss(arrays, weights))
            for variable, value in before:  # such as moving statistics
                variable.assign(value)
            return first, float(self._mean_loss(arrays, weights))

    def gradients(self, arrays: Arrays, weights: NDArray[Any]) -> tuple[float, PortableState]:
        """Return the mean loss in training and its gradient by portable names."""
        variables = [native(field.variable) for field in self._fields]
        with state_kept(self._model):
            with tf.GradientTape() as tape:
                loss = self._mean_loss(arrays, weights)
            found = tape.gradient(loss, variables)
        gradients = {}
        for field, variable, gradient in zip(self._fields, variables, found, strict=True):
            dense = tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
            gradients[field.name] = _laid_out(field, to_array(dense))
        return float(loss), gradients

    def optimizer(self) -> dict[str, Any]:
        """Return what the optimizer was made with, under names that both frameworks share."""
        constraints = {field.name: getattr(field.variable, "constraint", None) for field in self._fields}
        named = {name: type(one).__name__ for name, one in constraints.items() if one is not None}
        return optimizer_settings(self._backend.optimizers[0]) | {CONSTRAINTS: named}

    def _forward(self, arrays: Arrays) -> ForwardPass:
        with Recorder(self._model, self._paths) as recorder, phase_of_layers(False):
            losses, _ = self._objective(Phase(self._called, False), _tensors(arrays))
        values = losses.values if isinstance(losses, Weighted) else losses
        calls = tuple(call for call in recorder.calls if call.path)
        return ForwardPass(
            calls,
            next(iter(recorder.outputs), None),
            np.atleast_1d(to_array(values)),
            recorder.outputs[1:],
            recorder.narrow,
        )

    def _mean_loss(self, arrays: Arrays, weights: NDArray[Any]) -> Tensor:
        phase = Phase(self._called, True)
        with phase_of_layers(True):
            losses, _ = self._train_objective(phase, _tensors(arrays))
        if (added := phase.added_loss()) is not None:
            losses = add_to_loss(losses, added)
        own: Tensor | None = None
        if isinstance(losses, Weighted):
            losses, own = losses.values, tf.stop_gradient(tf.convert_to_tensor(losses.weights))
        losses = tf.convert_to_tensor(losses)
        wide = tf.float64 if losses.dtype == tf.float64 else tf.float32
        losses = tf.cast(losses, wide)
        if losses.shape.rank == 0:
            return losses
        counted = tf.cast(tf.convert_to_tensor(weights), wide)
        counted = counted if own is None else counted * tf.cast(own, wide)
        return tf.reduce_sum(losses * counted) / tf.reduce_sum(counted)


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: tf.constant(array) for name, array in arrays.items()}


def _laid_out(field: Field, gradient: NDArray[Any]) -> NDArray[Any]:
    return gradient.reshape(field.shape)
