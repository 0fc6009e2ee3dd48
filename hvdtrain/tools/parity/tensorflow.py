"""Looking into a model of Keras; ``torch.py`` does the same for PyTorch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras.src.layers import layer as keras_layer
from numpy.typing import NDArray
from tensorflow.python.framework import op_callbacks

from hvdtrain.backends.base import Backend
from hvdtrain.backends.objective.counting import Weighted
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.tensorflow.functions import Phase, add_to_loss, native, phase_of_layers
from hvdtrain.backends.tensorflow.objective.losses import NAMED
from hvdtrain.backends.tensorflow.precision import cast_outputs_to_fp32
from hvdtrain.backends.tensorflow.probes import as_array, state_kept
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState, walk
from hvdtrain.config import Config
from hvdtrain.tools.parity.findings import CLASS, CONSTRAINTS
from hvdtrain.tools.parity.observation import LOSS, MODEL, SOFTMAX, CallRecorder, ForwardPass, LayerCall
from hvdtrain.tools.parity.probe import Probe as ProbeBase
from hvdtrain.tools.parity.probe import layer_paths

_CONVOLUTIONS = (kl.Conv1D, kl.Conv2D, kl.Conv3D)
# those of spatial dropout are kinds of Dropout
_DROPOUTS = (kl.Dropout, kl.AlphaDropout, kl.GaussianDropout)
_NORMS = (kl.BatchNormalization, kl.LayerNormalization, kl.GroupNormalization, kl.RMSNormalization)


def settings_of(layer: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a layer was made with.

    Args:
        layer: the layer.
        shape: the shape of its input; empty if that is no tensor.
    """
    found: dict[str, Any] = {}
    if isinstance(layer, _NORMS):
        found["epsilon"] = float(layer.epsilon)
    if isinstance(layer, kl.BatchNormalization):
        found["kept statistics"] = round(float(layer.momentum), 12)
    if isinstance(layer, kl.GroupNormalization):
        found["groups"] = layer.groups
    if isinstance(layer, (kl.Dense, *_CONVOLUTIONS)):
        found["bias"] = bool(layer.use_bias)
    if isinstance(layer, _CONVOLUTIONS):
        found |= {"strides": list(layer.strides), "dilation": list(layer.dilation_rate)}
        found["groups"] = layer.groups
        if len(shape) == len(layer.kernel_size) + 2:
            found["padding"] = _padding(layer, shape)
    activation = getattr(layer, "activation", None)
    if isinstance(layer, kl.Activation) and activation is keras.activations.gelu:
        found["gelu"] = "erf"
    if isinstance(layer, kl.LeakyReLU):
        found["negative slope"] = float(layer.negative_slope)
    if isinstance(layer, _DROPOUTS):
        found["rate"] = float(layer.rate)
    if isinstance(layer, kl.MultiHeadAttention):
        found["heads"] = layer.num_heads
    return found


def is_channels_first(layer: Any) -> bool:
    """Return whether a layer takes and gives arrays whose second axis is that of channels."""
    return getattr(layer, "data_format", None) == "channels_first"


def stop_dropout(model: Any) -> list[float]:
    """Let the dropout layers of a model drop nothing; return the rates that they had."""
    rates = []
    for layer in {id(one): one for one in model._flatten_layers()}.values():
        is_dropout = isinstance(layer, _DROPOUTS)
        for name in ("rate", "_dropout", "dropout", "recurrent_dropout"):
            value = vars(layer).get(name)
            if isinstance(value, int | float) and value and (is_dropout or name != "rate"):
                rates.append(float(value))
                setattr(layer, name, 0.0)
    return rates


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return what an optimizer was made with."""
    found: dict[str, Any] = {CLASS: type(optimizer).__name__}
    for name in ("momentum", "epsilon", "nesterov"):
        if hasattr(optimizer, name):
            found[name] = getattr(optimizer, name)
    if hasattr(optimizer, "beta_1"):
        found["betas"] = [float(optimizer.beta_1), float(optimizer.beta_2)]
    if not type(optimizer).__module__.startswith("hvdtrain."):  # the trainer's own have another field
        found["weight decay"] = float(optimizer.weight_decay or 0.0)
    return found


def _padding(layer: Any, shape: tuple[int, ...]) -> list[list[int]]:
    """Return what a convolution adds before and after each spatial axis of inputs of a shape.

    With "same", the output has the size of the input / the stride, and what is odd is added behind.
    """
    sizes = shape[2:] if is_channels_first(layer) else shape[1:-1]
    found = []
    for size, kernel, stride, dilation in zip(
        sizes, layer.kernel_size, layer.strides, layer.dilation_rate, strict=True
    ):
        reach = dilation * (kernel - 1) + 1
        if layer.padding == "same":
            total = max((-(-size // stride) - 1) * stride + reach - size, 0)
            found.append([total // 2, total - total // 2])
        else:
            found.append([reach - 1, 0] if layer.padding == "causal" else [0, 0])
    return found


# layers that apply an activation to what their weights give
_ACTIVATING = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Conv1D, keras.layers.Conv2D,
               keras.layers.Conv3D)  # fmt: skip


class Recorder(CallRecorder):
    """Keeps the calls of a model's layers, within its context."""

    def __init__(self, model: Any, paths: Mapping[int, str]) -> None:
        super().__init__(model, paths)
        self._before: dict[int, NDArray[Any] | None] = {}
        self._running: list[str] = []  # paths of the layers that run
        self._stack = ExitStack()

    def __enter__(self) -> "Recorder":
        plain = keras_layer.Layer.__call__
        recorder = self

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder._record(plain, layer, args, kwargs)

        self._stack.enter_context(_replaced(keras_layer.Layer, "__call__", call))
        for layer in {id(one): one for one in self._model._flatten_layers()}.values():
            activation = getattr(layer, "activation", None)
            if isinstance(layer, _ACTIVATING) and activation not in (None, keras.activations.linear):
                self._stack.enter_context(_noting(layer, activation, self._before))
        op_callbacks.add_op_callback(self._operation)
        self._stack.callback(op_callbacks.remove_op_callback, self._operation)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _record(self, plain: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
        if id(layer) not in self._paths or not tf.executing_eagerly():
            return plain(layer, *args, **kwargs)
        inputs = first_array((args, kwargs))
        self._running.append(self._paths[id(layer)])
        try:
            outputs = plain(layer, *args, **kwargs)
        finally:
            self._running.pop()
        if layer is self._model and not self.outputs:
            self.outputs = tuple(all_arrays(outputs))
        self.calls.append(
            LayerCall(
                self._paths[id(layer)],
                type(layer).__name__,
                settings_of(layer, () if inputs is None else inputs.shape),
                inputs,
                first_array(outputs),
                self._before.pop(id(layer), None),
                channels_first=is_channels_first(layer),
            )
        )
        return outputs

    def _operation(
        self, kind: Any, inputs: Any, _attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        name = kind.decode() if isinstance(kind, bytes) else str(kind)
        if graph is not None:
            return
        if name == "Softmax" and self._running:
            self.calls.append(LayerCall(SOFTMAX, "softmax", {}, None, first_array(outputs[0])))
        if name == "Cast" and (inputs[0].dtype, outputs[0].dtype) == (tf.float64, tf.float32):
            path = (self._running[-1] or MODEL) if self._running else LOSS
            self.narrow = self.narrow or path


@contextmanager
def _noting(layer: Any, activation: Callable[[Any], Any], found: dict[int, Any]) -> Iterator[None]:
    """Return a context that notes what a layer gives to its activation."""

    def noting(values: Any) -> Any:
        found[id(layer)] = first_array(values)
        return activation(values)

    with _replaced(layer, "activation", noting):
        yield


@contextmanager
def _replaced(thing: Any, name: str, other: Any) -> Iterator[None]:
    """Return a context in which an object has another attribute; Keras does not see that it changes."""
    set_attribute = type.__setattr__ if isinstance(thing, type) else object.__setattr__
    before = getattr(thing, name)
    set_attribute(thing, name, other)
    try:
        yield
    finally:
        set_attribute(thing, name, before)


def first_array(value: Any) -> NDArray[Any] | None:
    """Return a copy of the first tensor in a structure; None if there is none."""
    return next(all_arrays(value), None)


def all_arrays(value: Any) -> Iterator[NDArray[Any]]:
    """Yield copies of the tensors in a structure; those of a dictionary in the order of its keys."""
    for leaf in tf.nest.flatten(value):
        if tf.is_tensor(leaf) or isinstance(leaf, np.ndarray):
            yield to_array(leaf)


def to_array(tensor: Any) -> NDArray[Any]:
    """Return a copy of a tensor as an array; of half precision as fp32."""
    return np.array(as_array(tf.convert_to_tensor(tensor)))


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


class Probe(ProbeBase):
    """Looks into a model that the backend has built."""

    def __init__(self, backend: Backend, task: Any, config: Config) -> None:
        super().__init__(backend, task, config, NAMED)
        self._called = cast_outputs_to_fp32(self._model, config.precision)
        tensors = ModelState(self._model, self._renaming)
        self._fields = list(tensors.trainable_fields())
        self._paths = layer_paths(
            (("/".join(path), id(layer)) for path, layer in walk(self._model)),
            ((field.own, field.path) for field in tensors.fields),
            self._renaming,
        )

    def forward(self, arrays: Arrays) -> tuple[ForwardPass, ForwardPass]:
        """Return two forward passes in evaluation with the same samples."""
        with state_kept(self._model):
            return self._forward(arrays), self._forward(arrays)

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
        return recorder.forward_pass(to_array(values))

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
