"""What Keras's layers are given and give; ``torch/calls.py`` does the same for PyTorch's modules."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers import layer as keras_layer
from numpy.typing import NDArray
from tensorflow.python.framework import op_callbacks

from hvdtrain.parity.tensorflow.settings import is_channels_first, settings_of
from hvdtrain.tools.parity.observation import LOSS, MODEL, SOFTMAX, LayerCall

# layers that apply an activation to what their weights give
_ACTIVATING = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Conv1D, keras.layers.Conv2D,
               keras.layers.Conv3D)  # fmt: skip


class Recorder:
    """Keeps the calls of a model's layers, within its context.

    Args:
        model: the model.
        paths: portable path of each layer, by its identity.

    Attributes:
        calls: the calls in the order in which they ended.
        outputs: all outputs of the model itself.
        narrow: the layer in which numbers of fp64 were first made fp32; empty if there is none.
    """

    def __init__(self, model: Any, paths: Mapping[int, str]) -> None:
        self.calls: list[LayerCall] = []
        self.outputs: tuple[NDArray[Any], ...] = ()
        self.narrow = ""
        self._model, self._paths = model, paths
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
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype in (tf.bfloat16, tf.float16):
        tensor = tf.cast(tensor, tf.float32)
    return np.array(tensor.numpy())
