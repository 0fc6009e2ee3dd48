"""The variables of a Keras model that no optimizer updates; see also ``torch/replica_state.py``."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.replica_state import Changes, StateTensor, made_late
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.sync_batch_norm import find_batch_norms

_STATISTICS = ("moving_mean", "moving_variance")


class StateTensors:
    """A model's weights that are not trained."""

    def __init__(self, model: Any, tensors: ModelState) -> None:
        self._model = model
        norms = find_batch_norms(model).values()
        self._statistics = {id(getattr(norm, name, None)) for norm in norms for name in _STATISTICS}
        self._tensors = tensors

    def __call__(self) -> list[StateTensor]:
        """Return the variables that are not trained now."""
        return [self._state_tensor(field) for field in self._tensors.fields if not field.trainable]

    @contextmanager
    def watched(self) -> Iterator[Changes]:
        """Return a context in which the model is called, and what that changes is found out. Local."""
        found = Changes()
        own = [f for f in self._tensors.fields if not f.trainable and id(f.variable) not in self._statistics]
        with tf.device("CPU"):
            before = [(field, tf.identity(native(field.variable))) for field in own]
        known = {id(variable) for variable in self._model.weights}
        yield found
        for field, value in before:
            data = as_bytes(field.variable)
            if not np.array_equal(data, as_bytes(value)):
                found.crcs[field.name] = zlib.crc32(data.data)
        late = [variable.path for variable in self._model.weights if id(variable) not in known]
        found.refusal = made_late(late, "tf_model", "model(inputs, training=True)")

    def _state_tensor(self, field: Field) -> StateTensor:
        variable = field.variable
        name = str(variable.dtype)
        kind = "b" if name == "bool" else "c" if "complex" in name else "f" if "float" in name else "i"
        default = "mean" if id(variable) in self._statistics else ""
        return StateTensor(
            field.name,
            kind,
            default,
            partial(as_bytes, variable),
            partial(_write, variable),
            partial(_numbers, variable),
            partial(_assign, variable),
        )


def as_bytes(variable: Any) -> NDArray[np.uint8]:
    """Return a variable's values as bytes in the host's memory."""
    return np.ascontiguousarray(variable.numpy()).reshape(-1).view(np.uint8)


def _write(variable: Any, data: NDArray[np.uint8]) -> None:
    value = variable.numpy()
    variable.assign(data.copy().view(value.dtype).reshape(value.shape))


def _numbers(variable: Any) -> NDArray[np.float64]:
    return np.array(variable.numpy(), np.float64).reshape(-1)


def _assign(variable: Any, numbers: NDArray[np.float64]) -> None:
    value = variable.numpy()
    variable.assign(numbers.reshape(value.shape).astype(value.dtype))
